"""The broker process: sockets, epochs, the admin server, and the supervisor of `bascule up`."""
