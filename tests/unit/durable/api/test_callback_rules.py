import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bus.naming import durable_subjects as subjects
from weir.bus.naming.reserved_subjects import subject_problem
from weir.durable.api.callback_rules import MAX_URL_LENGTH, CallbackRules, read_url
from weir.schemas.core.errors import WeirError

RULES = CallbackRules(
    ["https://hooks.example.com/weir/", "http://127.0.0.1:9000/in", "http://[::1]:8080/", "http://localhost:7000/"]
)


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com/weir/a",
        "https://HOOKS.example.com:443/weir/a?b=c",
        "https://hooks.example.com./weir/",
        "http://127.0.0.1:9000/in",
        "http://127.0.0.1:9000/in?x=1",
        "http://127.0.0.1:9000/in/a",
        "http://[::1]:8080/anything",
    ],
)
def test_urls_below_a_prefix_are_allowed(url: str) -> None:
    assert RULES.check_url(url).path.startswith(("/weir/", "/in", "/anything"))


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/weir/a",
        "https://hooks.example.com:8443/weir/a",
        "https://hooks.example.com/weirdo",
        "https://hooks.example.com/weir",
        "https://hooks.example.com/weir/../admin",
        "https://hooks.example.com/weir/%2e%2e/admin",
        "https://hooks.example.com/weir/%252e%252e/admin",
        "https://hooks.example.com/weir/..%2fadmin",
        "https://hooks.example.com/weir/..%5cadmin",
        "https://hooks.example.com/weir/\\..\\admin",
        "https://hooks.example.com/weir/#x",
        "https://user@hooks.example.com/weir/",
        "https://hooks.example.com@evil.example/weir/",
        "https://hooks.example.com.evil.example/weir/",
        "https://evil.example/https://hooks.example.com/weir/",
        "https://hooks.example.com:/weir/",
        "https://hooks.example.com:99999/weir/",
        "https://hooks.example.com:x/weir/",
        "http://127.0.0.1:9000/inside",
        "http://127.1:9000/in",
        "http://2130706433:9000/in",
        "http://0x7f.1:9000/in",
        "http://[::ffff:127.0.0.1]:9000/in",
        "ftp://hooks.example.com/weir/",
        "//hooks.example.com/weir/",
        "https:///weir/",
        "https://hooks.example.com/weir/ a",
        "https://hooks.example.com/weir/\r\nHost: x",
        "https://hooks.example.com/weir/\t",
        "https://hooks.example.com/weir/é",
        "https://hooks.example.com/weir/" + "a" * 1024,
        "",
    ],
)
def test_other_urls_are_not(url: str) -> None:
    with pytest.raises(WeirError, match="callback URL"):
        RULES.check_url(url)


def test_nothing_is_allowed_without_prefixes() -> None:
    rules = CallbackRules()
    assert not rules.allow_any
    with pytest.raises(WeirError, match="not allowed on this server"):
        rules.check_url("https://hooks.example.com/weir/a")


@pytest.mark.parametrize(
    "url, address, admitted",
    [
        ("https://hooks.example.com/weir/", "203.0.113.7", True),
        ("https://hooks.example.com/weir/", "10.1.2.3", True),
        ("https://hooks.example.com/weir/", "2001:db8::1", True),
        ("https://hooks.example.com/weir/", "127.0.0.1", False),
        ("https://hooks.example.com/weir/", "127.8.8.8", False),
        ("https://hooks.example.com/weir/", "0.0.0.0", False),
        ("https://hooks.example.com/weir/", "::", False),
        ("https://hooks.example.com/weir/", "169.254.169.254", False),
        ("https://hooks.example.com/weir/", "::ffff:169.254.169.254", False),
        ("https://hooks.example.com/weir/", "::ffff:127.0.0.1", False),
        ("https://hooks.example.com/weir/", "64:ff9b::a9fe:a9fe", False),
        ("https://hooks.example.com/weir/", "2002:a9fe:a9fe::", False),
        ("https://hooks.example.com/weir/", "::a9fe:a9fe", False),
        ("https://hooks.example.com/weir/", "fe80::1%eth0", False),
        ("https://hooks.example.com/weir/", "fd00:ec2::254", False),
        ("https://hooks.example.com/weir/", "100.100.100.200", False),
        ("https://hooks.example.com/weir/", "224.0.0.1", False),
        ("https://hooks.example.com/weir/", "::1", False),
        ("https://hooks.example.com/weir/", "nonsense", False),
        ("http://127.0.0.1:9000/in", "127.0.0.1", True),
        ("http://127.0.0.1:9000/in", "127.0.0.2", False),
        ("http://[::1]:8080/", "::1", True),
        ("http://localhost:7000/", "127.0.0.1", True),
        ("http://localhost:7000/", "::1", True),
        ("http://localhost:7000/", "10.0.0.1", False),
        ("http://169.254.169.254/x", "169.254.169.254", True),
    ],
)
def test_where_a_connection_may_go(url: str, address: str, admitted: bool) -> None:
    assert CallbackRules.admits_address(read_url(url), address) is admitted


@given(st.text(max_size=80))
def test_no_text_is_more_than_refused(text: str) -> None:
    with pytest.raises(WeirError):
        RULES.check_url(text)


@given(st.text(min_size=1, max_size=60))
def test_what_follows_an_allowed_prefix_stays_below_it(rest: str) -> None:
    try:
        url = RULES.check_url(f"https://hooks.example.com/weir/{rest}")
    except WeirError:
        return
    assert (url.host, url.port) == ("hooks.example.com", 443)
    assert url.target.startswith("/weir/")
    assert ".." not in url.path.split("/")
    assert not any(character.isspace() for character in url.target)


def test_the_longest_url_travels_in_a_reply_subject() -> None:
    url = "http://127.0.0.1:9000/in/" + "a" * (MAX_URL_LENGTH - 25)
    RULES.check_url(url)
    assert subject_problem(subjects.callback("f" * 32, url)) == ""


@given(st.text(max_size=20), st.text(max_size=60))
def test_a_url_travels_in_a_subject(id: str, url: str) -> None:
    subject = subjects.callback(id, url)
    assert subjects.callback_url(subject) == url
    assert len(subject.split(".")) == 3
