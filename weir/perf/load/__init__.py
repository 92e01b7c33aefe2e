"""What decides, without I/O or a clock: levels of a sweep, arrivals, steps of sequences, when a level is stable."""
