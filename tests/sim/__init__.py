"""The whole of Bascule under one seed: broker, journal, pipelines and clients as they are, on a model of Kafka, in virtual time."""
