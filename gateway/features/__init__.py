"""The parts of a gateway that can be left out: each is built by one constructor, and comes out in one place."""
