"""Atomikos takes sessions of pooled connections in every order within its transactions: each message is in the queue, or none is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bascule.client import Queue, connect
from bascule.embedded.jars import classpath
from bascule.embedded.java import find_jdk
from tests.support.java import JARS, SMALL_JVM, compiled_sources
from tests.support.maven import XA_PROJECT
from tests.support.speed import SLOWNESS
from tests.support.system import System

pytestmark = [pytest.mark.services, pytest.mark.timeout(280)]
ATOMIKOS = "spring-boot"
RUN_TIMEOUT_S = 120.0 * SLOWNESS
PROGRAM = """
import bascule.xa.BasculeXAConnectionFactory;
import com.atomikos.icatch.jta.UserTransactionManager;
import com.atomikos.jms.AtomikosConnectionFactoryBean;
import jakarta.jms.Connection;
import jakarta.jms.Session;
import jakarta.transaction.Transaction;

final class PooledSessions {
    private static final UserTransactionManager MANAGER = new UserTransactionManager();
    private static AtomikosConnectionFactoryBean pool;

    interface Work {
        void carryOut(Connection connection) throws Exception;
    }

    private static void send(Session session, String text) throws Exception {
        session.createProducer(session.createQueue("bills")).send(session.createTextMessage(text));
    }

    private static void sendOnce(Connection connection, String text) throws Exception {
        Session session = connection.createSession(true, 0);
        send(session, text);
        session.close();
    }

    private static void inTransaction(boolean commits, Work work) throws Exception {
        MANAGER.begin();
        Connection connection = pool.createConnection();
        work.carryOut(connection);
        connection.close();
        if (commits) {
            MANAGER.commit();
        } else {
            MANAGER.rollback();
        }
    }

    private static void carryOutAll(boolean commits, String end) throws Exception {
        inTransaction(commits, connection -> {
            Session one = connection.createSession(true, 0);
            Session other = connection.createSession(true, 0);
            send(one, "open 1 " + end);
            send(other, "open 2 " + end);
            one.close();
            other.close();
        });
        inTransaction(commits, connection -> {
            sendOnce(connection, "successive 1 " + end);
            sendOnce(connection, "successive 2 " + end);
        });
        inTransaction(commits, connection -> {
            sendOnce(connection, "outer 1 " + end);
            Transaction outer = MANAGER.suspend();
            inTransaction(true, inner -> sendOnce(inner, "inner committed"));
            MANAGER.resume(outer);
            sendOnce(connection, "outer 2 " + end);
        });
        inTransaction(commits, connection -> {
            Session session = connection.createSession(true, 0);
            send(session, "outer 3 " + end);
            Transaction outer = MANAGER.suspend();
            MANAGER.begin();
            sendOnce(connection, "beside committed");
            MANAGER.commit();
            MANAGER.resume(outer);
            send(session, "outer 4 " + end);
            session.close();
        });
    }

    public static void main(String[] arguments) throws Exception {
        pool = new AtomikosConnectionFactoryBean();
        pool.setUniqueResourceName("bascule");
        pool.setXaConnectionFactory(new BasculeXAConnectionFactory(arguments[0]));
        pool.setMaxPoolSize(2);
        MANAGER.init();
        carryOutAll(true, "committed");
        carryOutAll(false, "rolled back");
        pool.close();
        MANAGER.close();
        System.exit(0);
    }
}
"""


def test_sessions_of_pooled_connections_work_in_their_transactions_in_any_order(system: System, tmp_path: Path) -> None:
    source = tmp_path / "PooledSessions.java"
    source.write_text(PROGRAM)
    factory = sorted((XA_PROJECT / "bascule-xa-jakarta" / "src" / "main" / "java").rglob("*.java"))
    jars = [compiled_sources("pooled-sessions", [*factory, source], JARS, ATOMIKOS), *classpath(JARS), *classpath(ATOMIKOS)]
    settings = {"log_base_dir": tmp_path / "log", "tm_unique_name": "pooled"}
    (tmp_path / "log").mkdir()
    command = [
        str(find_jdk().executable), *SMALL_JVM, *(f"-Dcom.atomikos.icatch.{name}={value}" for name, value in settings.items()),
        "-cp", os.pathsep.join(map(str, jars)), "PooledSessions", system.url,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    with connect(system.url) as context:
        bills = sorted(str(message.body) for message in context.browse(Queue("bills")))
    outer = [f"outer {number} committed" for number in range(1, 5)]
    sessions = [f"{way} {number} committed" for way in ("open", "successive") for number in (1, 2)]
    assert bills == sorted([*outer, *sessions, *2 * ["inner committed", "beside committed"]])
    assert system.status()["branches"] == []
