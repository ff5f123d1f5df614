"""Child processes of a server that compute for it: starting, watching and restarting them."""
