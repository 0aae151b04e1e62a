"""Communication between ranks: one communicator, whatever engine carries it."""
