"""A port's certificate: what is wrong with its files is told by setting, and a bad new one leaves the old one there."""

from __future__ import annotations

import datetime
import logging

import pytest
from fakes.certificates import DAY, make_authority

from configs.access import TlsSettings
from configs.load import SettingsError
from runtime.access.certificates import PortTls, read_certificate


@pytest.fixture
def authority(tmp_path):
    return make_authority(tmp_path)


def settings_of(issued, **more) -> TlsSettings:
    return TlsSettings(certificate=issued.certificate, key=issued.key, **more)


def test_what_is_read_is_what_is_shown(authority):
    issued = authority.issue("front")
    read = read_certificate(settings_of(issued, client_ca=authority.certificate), "server.tls")
    assert read.pair.certificate == issued.certificate.read_bytes()
    assert read.client_ca == authority.certificate.read_bytes()
    assert read.ends > datetime.datetime.now(datetime.UTC)
    assert issued.key.read_text().splitlines()[1] not in repr(read)


def problem_of(settings: TlsSettings, where: str = "server.tls") -> str:
    with pytest.raises(SettingsError) as caught:
        PortTls(settings, where)
    return str(caught.value)


def test_wrong_files_are_told_by_setting_file_and_remedy(tmp_path, authority):
    front, other = authority.issue("front"), authority.issue("other")
    expired = authority.issue("expired", begins=-2 * DAY, ends=-DAY)
    early = authority.issue("early", begins=DAY)
    encrypted = authority.issue("encrypted", passphrase=b"open sesame")
    old = make_authority(tmp_path / "old")
    junk = tmp_path / "junk"
    junk.write_text("junk")
    gone = tmp_path / "gone"
    told = {
        "mismatched": problem_of(TlsSettings(certificate=front.certificate, key=other.key)),
        "expired": problem_of(settings_of(expired)),
        "early": problem_of(settings_of(early)),
        "encrypted": problem_of(settings_of(encrypted)),
        "no key": problem_of(TlsSettings(certificate=front.certificate, key=junk)),
        "no certificate": problem_of(TlsSettings(certificate=junk, key=front.key)),
        "swapped": problem_of(TlsSettings(certificate=front.key, key=front.certificate)),
        "gone": problem_of(TlsSettings(certificate=front.certificate, key=gone)),
        "no authority": problem_of(settings_of(front, client_ca=junk)),
        "operators": problem_of(settings_of(front, client_ca=gone), "operator.tls"),
    }
    starts = {case: text.split(" ", 2)[:2] for case, text in told.items()}
    assert starts == {
        "mismatched": ["server.tls.key:", str(other.key)],
        "expired": ["server.tls.certificate:", str(expired.certificate)],
        "early": ["server.tls.certificate:", str(early.certificate)],
        "encrypted": ["server.tls.key:", str(encrypted.key)],
        "no key": ["server.tls.key:", str(junk)],
        "no certificate": ["server.tls.certificate:", str(junk)],
        "swapped": ["server.tls.certificate:", str(front.key)],
        "gone": ["server.tls.key:", "there"],
        "no authority": ["server.tls.client_ca:", str(junk)],
        "operators": ["operator.tls.client_ca:", "there"],
    }
    assert "has expired at" in told["expired"]
    assert "is not valid before" in told["early"]
    assert "passphrase" in told["encrypted"]
    assert not any(str(old.certificate) in text for text in told.values())
    assert all(("; " in text) for text in told.values()), "each has a remedy"


def test_a_certificate_that_is_about_to_expire_is_told_of(authority, caplog):
    with caplog.at_level(logging.WARNING, "runtime.access.certificates"):
        PortTls(settings_of(authority.issue("long", ends=8 * DAY)), "server.tls")
        assert not caplog.messages
        PortTls(settings_of(authority.issue("short", ends=6 * DAY)), "server.tls")
    [line] = caplog.messages
    assert line.startswith(f"server.tls.certificate: {authority.folder / 'short.pem'} expires at ")


def test_a_new_pair_is_taken_when_both_halves_are_there(authority, caplog):
    issued = authority.issue("front")
    tls = PortTls(settings_of(issued), "server.tls")
    old = tls.watched.current
    # The new pair comes a file at a time, as most tools write it.
    new = authority.issue("next")
    issued.certificate.write_bytes(new.certificate.read_bytes())
    with caplog.at_level(logging.ERROR):
        assert not tls.watched.check()
    assert tls.watched.current is old
    assert "server.tls.key" in caplog.text
    issued.key.write_bytes(new.key.read_bytes())
    assert tls.watched.check()
    assert tls.watched.current.pair.certificate == new.certificate.read_bytes()
