from __future__ import annotations

from weir.options import SERVE, options_of
from weir.serve_command import worker_roles

VALUES = {key: () if option.repeatable else option.default for key, option in options_of(SERVE).items()}


def test_one_worker_on_a_host_with_at_most_one_gpu() -> None:
    for gpus in (0, 1):
        (role,) = worker_roles(VALUES, gpus)
        assert role.name == "worker"
        assert not [word for word in role.argv if "gpu" in word or "cpu" in word]


def test_one_worker_for_each_gpu_and_one_of_them_for_the_cpu() -> None:
    roles = worker_roles({**VALUES, "model_load_thread_count": 2}, 3)
    assert [role.name for role in roles] == ["worker-0", "worker-1", "worker-2"]
    assert ["--gpu=0" in roles[0].argv, "--gpu=1" in roles[1].argv, "--gpu=2" in roles[2].argv] == [True] * 3
    assert ["--cpu-instances=false" in role.argv for role in roles] == [False, True, True]
    assert all("--model-load-thread-count=2" in role.argv for role in roles)
    assert len({role.drain_rank for role in roles}) == 1
