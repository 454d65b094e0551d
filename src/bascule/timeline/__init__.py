"""The life of one message, found again in the journal, the target topics of diverts, and the audit topic."""
