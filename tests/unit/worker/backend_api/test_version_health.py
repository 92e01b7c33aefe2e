"""`VersionHealth`: available instances, and what is published about them."""

from weir.worker.backend_api.version_health import VersionHealth


class Says:
    async def ask(self) -> bool:
        return True


def test_there_is_a_problem_only_while_no_instance_is_available() -> None:
    changes: list[tuple[str, bool]] = []
    health = VersionHealth(lambda: changes.append((health.problem, health.has_readiness_checks)))
    assert not health.problem
    health.up("a")
    health.up("b")
    health.down("a", "dead")
    assert health.is_down("a")
    assert not health.is_down("b")
    assert health.has_other_up("a")
    assert not health.has_other_up("b")
    assert changes == []
    health.down("b", "dead too")
    health.up("a", Says())
    health.remove("b")
    assert changes == [("dead", False), ("", True)]
    assert len(health.probes()) == 1


def test_passive_instances_do_not_count() -> None:
    health = VersionHealth()
    health.passive("p")
    health.up("p", Says())
    health.up("a")
    health.down("a", "dead")
    assert health.problem == "dead"
    assert not health.has_other_up("a")
    assert not health.probes()
