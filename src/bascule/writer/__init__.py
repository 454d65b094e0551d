"""The exactly-once writer without IO: positions, transactions that compare and set one, tables that are checked before they are written."""
