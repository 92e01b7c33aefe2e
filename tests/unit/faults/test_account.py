"""The check of recorded requests detects lost, duplicated and wrong ones."""

from pathlib import Path

from tests.faults.account import Account, check
from tests.faults.report import FaultReport
from tests.support.durable.ledger import answer_to


def test_what_is_as_it_must_be_is_found_so(tmp_path: Path) -> None:
    account = Account(tmp_path, 7)
    for _ in range(100):
        number, payload = account.next()
        account.end(number, answer_to(payload), "", 0.5, 0)
    account.close()
    findings = check(account.promised, account.sent, account.ended)
    assert (findings.requests, findings.lost, findings.duplicated, findings.wrong) == (100, 0, 0, 0)
    assert findings.p99_s == 0.5


def test_each_flaw_is_found(tmp_path: Path) -> None:
    account = Account(tmp_path, 7)
    first, second, third, fourth = (account.next() for _ in range(4))
    account.end(first[0], answer_to(second[1]), "", 0.1, 0)
    account.end(second[0], answer_to(second[1]), "", 0.1, 1)
    account.end(second[0], answer_to(second[1]), "", 0.1, 0)
    account.end(fourth[0], "", "503 away", 0.1, 0)
    account.end(70, "", "503 nobody asked", 0.1, 0)
    account.close()
    findings = check(account.promised, account.sent, account.ended)
    assert (findings.requests, findings.lost, findings.duplicated, findings.wrong) == (4, 1, 1, 2)
    assert findings.again == 1
    assert third[0] == 2
    line = FaultReport("F-00", "flaws")
    line.add(findings, allowed="^503 away")
    assert not line.is_passed
    assert [failure for failure in line.failures if "nobody asked" in failure]
    assert "lost 1, duplicated 1, wrong 2" in line.text()


def test_what_is_skipped_has_not_passed() -> None:
    line = FaultReport("F-21", "a network", skipped="there is no `ip`")
    assert not line.is_passed
    assert line.verdict == "skipped"
    assert "there is no `ip`" in line.text()
