"""Commands on a cluster from elsewhere: its address, what is sent, run there, and fetched."""
