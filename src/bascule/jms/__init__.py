"""JMS on AMQP: the selector language, and the conversion between AMQP message sections and JMS messages."""
