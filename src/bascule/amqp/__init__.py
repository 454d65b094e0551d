"""AMQP 1.0 without IO: types, frames, SASL, and connections with their sessions and links, for servers and clients."""
