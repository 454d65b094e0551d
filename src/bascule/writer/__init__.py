"""The exactly-once writer without IO: positions, transactions that compare and set a position, tables that are checked before a write."""
