"""Which models `--load-model` means."""

from worker.startup_models import wanted_at_start

FOUND = ["once", "/a::twice", "/b::twice"]


def test_a_name_means_all_models_that_have_it():
    assert wanted_at_start(("*",), FOUND) == FOUND
    assert wanted_at_start(("twice", "once", "twice"), FOUND) == ["/a::twice", "/b::twice", "once"]
    assert wanted_at_start(("nobody",), FOUND) == ["nobody"]
    assert wanted_at_start((), FOUND) == []
