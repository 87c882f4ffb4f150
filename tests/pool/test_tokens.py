"""What a token proves: nobody makes one, changes one, or takes another's proof for it."""

import pytest

from jaxrl.pool.ledger import LedgerRefusal
from jaxrl.pool.ledger_sqlite import SqliteLedger
from jaxrl.pool.tokens import Claim, Tokens, claimed, fresh, name_of
from tests.pool.test_ledger import group, lease_of, sealed


def test_a_changed_token_opens_nothing_whatever_it_claims(tmp_path):
    ledger = SqliteLedger(str(tmp_path / "ledger.sqlite"), "run")
    ledger.begin_epoch()
    ledger.open_groups([group(0)])
    token, other = (lease_of(ledger).token for _ in range(2))
    name, _, proof = token.rpartition("-")
    assert token not in name and claimed(token) == Claim(0, 0, 0, 0, name.rpartition("-")[2])
    guesses = [name, f"1{token}", f"{name}-{proof[::-1]}", f"{name}-{other.split('-')[-1]}"]
    guesses += ["9" * 30 + token, f"{name}-{'0' * len(proof)}", f"0-0-0-1-{'0' * 16}-{proof}"]
    for guess in guesses:
        acts = (ledger.find, ledger.start, lambda token: ledger.seal(token, sealed()))
        for act in acts:
            with pytest.raises(LedgerRefusal) as refusal:
                act(guess)
            assert refusal.value.reason == "unknown"
    assert ledger.counts()["refused_unknown"] == 3 * len(guesses)
    assert ledger.find(token).token == token
    ledger.close()


def test_a_token_is_of_one_grant_and_one_secret():
    mine, others = Tokens(b"a" * 32), Tokens(b"b" * 32)
    once, other = fresh(), fresh()
    (first,), (again,) = (mine.grant([(7, 3, 1)], 2, grant) for grant in (once, other))
    assert first != again and name_of(first) != name_of(again)
    for reader in (mine, Tokens(b"a" * 32)):  # one that granted it, and one that did not
        assert reader.read(first) == Claim(7, 3, 1, 2, once)
    assert others.read(first) is None and mine.read(f"{first[:-1]}\N{SUPERSCRIPT TWO}") is None
    for wrong in ("", "-", "a-b", "1-", "\N{SUPERSCRIPT TWO}-1-x", f"{'1' * 19}-1-x"):
        assert mine.read(wrong) is None and claimed(wrong) is None
