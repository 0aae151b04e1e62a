"""Build Horovod for an environment, install it there and check it: the subcommand `gaudi-run install-horovod`."""
