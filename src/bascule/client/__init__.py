"""JMS for Python, on the AMQP engine of the broker."""
