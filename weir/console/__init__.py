"""The console: a web page with the state, the load and the requests of a cluster, served by a process of its own."""
