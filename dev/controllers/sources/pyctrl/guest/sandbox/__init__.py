"""What makes an interpreter without files, network and time a good place for a script."""
