"""JMS on AMQP: the selector language, and AMQP message sections as JMS messages and back."""
