package shop;

import bascule.xa.BasculeXAConnectionFactory;
import com.atomikos.icatch.config.UserTransactionServiceImp;
import com.atomikos.icatch.jta.UserTransactionManager;
import com.atomikos.jdbc.AtomikosDataSourceBean;
import com.atomikos.jms.AtomikosConnectionFactoryBean;
import java.util.Properties;
import org.postgresql.xa.PGXADataSource;
import org.springframework.beans.factory.annotation.Value;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.SpringBootConfiguration;
import org.springframework.boot.autoconfigure.EnableAutoConfiguration;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.DependsOn;
import org.springframework.jdbc.core.JdbcTemplate;
import org.springframework.jms.annotation.JmsListener;
import org.springframework.jms.core.JmsTemplate;
import org.springframework.transaction.jta.JtaTransactionManager;

/**
 * An order comes over JMS, becomes a row in PostgreSQL, a confirmation over JMS and, through an exclusive divert, a Kafka record: each once,
 * whatever is killed. Spring Boot's listeners and templates use one JTA transaction of Atomikos. docs/guides/xa-java.md says how to run it.
 */
@SpringBootConfiguration
@EnableAutoConfiguration
public class Payments {
    public static void main(String[] arguments) {
        SpringApplication.run(Payments.class, arguments);
    }

    /** Keeps the decisions in its log, and recovers at the next start what a crash has left. */
    @Bean(initMethod = "init", destroyMethod = "shutdownWait")
    UserTransactionServiceImp transactionService(@Value("${shop.transaction-log}") String directory) {
        Properties settings = new Properties();
        settings.setProperty("com.atomikos.icatch.tm_unique_name", "shop"); // another name for each process
        settings.setProperty("com.atomikos.icatch.log_base_dir", directory);
        settings.setProperty("com.atomikos.icatch.default_jta_timeout", "10000");
        // A prepared branch without a decision is rolled back after so long. Longer than any transaction takes.
        settings.setProperty("com.atomikos.icatch.max_timeout", "30000");
        // Otherwise a listener succeeds, too, where the database was away and the transaction is rolled back.
        settings.setProperty("com.atomikos.icatch.throw_on_heuristic", "true");
        return new UserTransactionServiceImp(settings);
    }

    @Bean
    JtaTransactionManager transactionManager(UserTransactionServiceImp service) {
        UserTransactionManager manager = new UserTransactionManager();
        manager.setStartupTransactionService(false);
        return new JtaTransactionManager(manager, manager);
    }

    /** By its name the next start finds the branches in PostgreSQL. */
    @Bean(initMethod = "init", destroyMethod = "close")
    @DependsOn("transactionService")
    AtomikosDataSourceBean dataSource(@Value("${shop.database-url}") String url) {
        PGXADataSource database = new PGXADataSource();
        database.setUrl(url);
        AtomikosDataSourceBean pool = new AtomikosDataSourceBean();
        pool.setUniqueResourceName("payments-db");
        pool.setXaDataSource(database);
        pool.setMaxPoolSize(5);
        return pool;
    }

    @Bean(initMethod = "init", destroyMethod = "close")
    @DependsOn("transactionService")
    AtomikosConnectionFactoryBean connectionFactory(@Value("${shop.broker-url}") String url) {
        AtomikosConnectionFactoryBean pool = new AtomikosConnectionFactoryBean();
        pool.setUniqueResourceName("broker");
        pool.setXaConnectionFactory(new BasculeXAConnectionFactory(url));
        pool.setMaxPoolSize(5);
        return pool;
    }

    @Bean
    Desk desk(JdbcTemplate rows, JmsTemplate messages) {
        return new Desk(rows, messages);
    }

    static class Desk {
        private final JdbcTemplate rows;
        private final JmsTemplate messages;

        Desk(JdbcTemplate rows, JmsTemplate messages) {
            this.rows = rows;
            this.messages = messages;
        }

        /** Receives, writes and sends in the transaction that Spring has begun for the listener. An exception rolls it back. */
        @JmsListener(destination = "payments.orders")
        void pay(String order) {
            rows.update("INSERT INTO payments VALUES (?)", order);
            messages.convertAndSend("payments.confirmed", order);
            messages.convertAndSend("payments.audit", order); // a divert writes it to Kafka
        }
    }
}
