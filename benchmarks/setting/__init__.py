"""What a measurement runs on: the machine, the servers, child processes, and the tally of bodies that ran."""
