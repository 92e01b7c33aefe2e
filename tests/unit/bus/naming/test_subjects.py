import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveLayout, LiveQueue


@pytest.mark.parametrize("name", ["resnet50", "a-b_c", "X"])
def test_plain_names_stay(name: str) -> None:
    assert subjects.token(name) == name
    assert subjects.live(name) == f"live.{name}"


@pytest.mark.parametrize(
    ("name", "token"), [("a.b", "a=2Eb"), ("a b", "a=20b"), ("*", "=2A"), (">", "=3E"), ("=", "=3D"), ("é", "=C3=A9")]
)
def test_what_nats_has_no_tokens_for_is_escaped(name: str, token: str) -> None:
    assert subjects.token(name) == token


@given(st.text(min_size=1))
def test_a_token_is_one_plain_token_and_gives_the_name_back(name: str) -> None:
    encodable = name.encode(errors="ignore").decode()
    token = subjects.token(encodable)
    assert not set(token) & set(".*> \r\n\t")
    assert token.isascii()
    assert subjects.untoken(token) == encodable


@given(st.text(), st.text())
def test_different_names_have_different_tokens(first: str, second: str) -> None:
    a, b = (name.encode(errors="ignore").decode() for name in (first, second))
    assert (subjects.token(a) == subjects.token(b)) == (a == b)


def test_registry_keys_and_their_subjects_fit_together() -> None:
    key = subjects.registry_key("worker-1", "a.b")
    assert key == "worker-1.a=2Eb"
    assert subjects.registry_subject(key).removeprefix(subjects.registry_subject("")) == key
    assert subjects.registry_key("worker-1") == "worker-1"


def test_a_consumer_s_name_is_never_too_long_for_the_broker() -> None:
    assert subjects.live_consumer("/a::m") == "live-=2Fa=3A=3Am"
    long = [subjects.live_consumer(f"{'/folder' * 60}::{name}") for name in ("m", "n")]
    assert len(set(long)) == 2
    assert max(map(len, long)) <= 255


@pytest.mark.parametrize(
    ("subject", "target"),
    [
        ("infer.a", ("a", "")),
        ("infer.a=2Eb.v12", ("a.b", "12")),
        ("infer.a.12", ("a", "12")),
        ("infer.a.v", ("a", "v")),
        ("infer.a.vv1", ("a", "v1")),
    ],
)
def test_the_model_of_a_subject_of_nats_clients(subject: str, target: tuple[str, str]) -> None:
    assert subjects.infer_target(subject) == target


def test_no_model_has_the_names_of_another_model_s_partition() -> None:
    queues = [LiveQueue(name, partition) for name in ("m", "m=p1", "m=70") for partition in (0, 1, 11)]
    layout = LiveLayout()
    for names in zip(*((layout.subject(q), q.consumer, q.cancel_subject, q.inbox("s")) for q in queues), strict=True):
        assert len(set(names)) == len(queues)
    assert (layout.subject(LiveQueue("m")), LiveQueue("m").consumer) == ("live.m", "live-m")
