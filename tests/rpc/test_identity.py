"""The tokens file: what it may say, whom its tokens stand for, and what is refused before the service starts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from block_manager_svc.core.errors import Unauthenticated
from block_manager_svc.identity import ALL_ROLES, EVERYBODY, BadTokensFile, Callers, Role


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def callers(folder: Path, *lines: str, mode: int = 0o600) -> Callers:
    return Callers(write(folder, *lines, mode=mode))


def write(folder: Path, *lines: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text("\n".join(lines))
    path.chmod(mode)
    return path


def test_without_a_file_everybody_may_do_everything_as_one_tenant() -> None:
    open_to_all = Callers()
    assert not open_to_all.ask_for_tokens
    assert open_to_all.identify(None) is open_to_all.identify("anything") is EVERYBODY
    assert (EVERYBODY.tenant.name, EVERYBODY.roles) == ("default", ALL_ROLES)


def test_a_token_stands_for_its_tenant_and_roles(tmp_path: Path) -> None:
    known = callers(
        tmp_path,
        "# a comment",
        "",
        f"token {digest('one')} blue gateway  # and another",
        f"token {digest('two')} red engine,operator",
    )
    assert known.ask_for_tokens
    one, two = known.identify("one"), known.identify("two")
    assert (one.tenant.name, one.roles, one.is_operator) == ("blue", {Role.GATEWAY}, False)
    assert (two.tenant.name, two.roles, two.is_operator) == ("red", {Role.ENGINE, Role.OPERATOR}, True)
    assert one.tenant.number != two.tenant.number


@pytest.mark.parametrize(
    ("token", "reason"),
    [(None, "TOKEN_MISSING"), ("", "TOKEN_MISSING"), ("other", "TOKEN_UNKNOWN"), (digest("one"), "TOKEN_UNKNOWN")],
)
def test_no_token_and_one_that_is_not_there_are_refused_without_repeating_it(
    tmp_path: Path, token: str | None, reason: str
) -> None:
    known = callers(tmp_path, f"token {digest('one')} blue gateway")
    with pytest.raises(Unauthenticated) as caught:
        known.identify(token)
    assert caught.value.reason == reason
    assert not token or token not in repr((caught.value.message, caught.value.numbers))


def test_tenants_of_one_group_share_a_realm_and_nobody_else_does(tmp_path: Path) -> None:
    names = ("a", "b", "c", "team")
    known = callers(tmp_path, "share team a b", *(f"token {digest(name)} {name} gateway" for name in names))
    a, b, c, namesake = (known.identify(name).tenant for name in names)
    assert a.realm == b.realm
    assert len({a.realm, c.realm, namesake.realm}) == 3
    assert len({tenant.number for tenant in (a, b, c, namesake)}) == 4
    assert len({owner for tenant in (a, b, c, namesake) for owner in (tenant.calls, tenant.engines)}) == 8


def test_a_file_that_is_read_again_counts_as_a_whole_and_keeps_the_numbers_of_tenants(tmp_path: Path) -> None:
    known = callers(tmp_path, f"token {digest('one')} blue gateway", f"token {digest('two')} red gateway")
    blue = known.identify("one").tenant
    write(tmp_path, f"token {digest('three')} green gateway", f"token {digest('four')} blue operator")
    known.reload()
    assert len(known) == 2
    assert known.identify("four").tenant == blue
    with pytest.raises(Unauthenticated):
        known.identify("one")


def test_a_file_that_became_wrong_changes_nothing(tmp_path: Path) -> None:
    known = callers(tmp_path, f"token {digest('one')} blue gateway")
    write(tmp_path, f"token {digest('two')} red gateway", "nonsense")
    with pytest.raises(BadTokensFile):
        known.reload()
    assert known.identify("one").tenant.name == "blue"
    with pytest.raises(Unauthenticated):
        known.identify("two")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("token abc blue gateway", "64 lowercase hexadecimal digits"),
        (f"token {digest('x').upper()} blue gateway", "64 lowercase hexadecimal digits"),
        (f"token {digest('x')} blue", "neither"),
        (f"token {digest('x')} bl/ue gateway", "a name has"),
        (f"token {digest('x')} blue admin", "roles are gateway, engine, operator, executor, not 'admin'"),
        (f"token {digest('one')} red gateway", "has a line already"),
        ("share team a", "neither"),
        ("share other b c", "b is in group team already"),
        ("password secret", "neither"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path, f"token {digest('one')} blue gateway", "share team a b", line)
    with pytest.raises(BadTokensFile) as caught:
        Callers(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert says in str(caught.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o666])
def test_a_file_that_everybody_may_read_or_write_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    with pytest.raises(BadTokensFile, match=r"everybody on this machine may .*chmod o= "):
        callers(tmp_path, f"token {digest('one')} blue gateway", mode=mode)
    assert len(callers(tmp_path, f"token {digest('one')} blue gateway", mode=0o640)) == 1


def test_a_file_that_is_not_there_or_no_text_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadTokensFile, match="No such file"):
        Callers(tmp_path / "none")
    path = write(tmp_path)
    path.write_bytes(b"\xff")
    with pytest.raises(BadTokensFile, match="not UTF-8 at byte 0"):
        Callers(path)
