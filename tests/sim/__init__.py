"""The simulation: the real broker, journal, pipelines and clients of Bascule on a model of Kafka, in virtual time, under one seed."""
