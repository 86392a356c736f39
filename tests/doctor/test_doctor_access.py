"""What `outrider doctor` says of certificates, identities and the audit log."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from fakes.certificates import DAY, Authority, Issued
from fakes.inquiries import MACHINE, inquiry, levels, text_of

from runtime.doctor import access
from runtime.doctor.finding import Level
from runtime.doctor.inquiry import Inquiry

TODAY = replace(MACHINE, now=lambda: datetime.now(UTC))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki", "authority")


def serving(issued: Issued, where: str = "server", **more: Any) -> Inquiry:
    issued.key.chmod(0o600)
    port = {"operator__port": 0} if where == "operator" else {}
    return inquiry(
        machine=TODAY,
        **port,
        **{f"{where}__tls__certificate": issued.certificate, f"{where}__tls__key": issued.key},
        **more,
    )


@pytest.mark.parametrize("where", ["server", "operator"])
def test_a_certificate_of_a_port(authority: Authority, where: str) -> None:
    good = authority.issue("good", "front.example", ends=60 * DAY)
    found = text_of(access.check_port_certificates(serving(good, where)))
    assert found.startswith(f"ok: {where}.tls: valid until ")
    assert "front.example" in found
    soon = serving(authority.issue("soon", ends=3 * DAY), where)
    assert "warning" in levels(access.check_port_certificates(soon))
    expired = serving(authority.issue("old", begins=-9 * DAY, ends=-1 * DAY), where)
    assert "has expired" in text_of(access.check_port_certificates(expired))
    assert levels(access.check_port_certificates(expired)) == ["failure"]
    mixed = Issued(certificate=good.certificate, key=authority.issue("other").key)
    assert levels(access.check_port_certificates(serving(mixed, where))) == ["failure"]


def test_plain_text_is_a_warning_where_tokens_travel(tmp_path: Path) -> None:
    assert levels(access.check_port_certificates(inquiry())) == ["note"]
    told = inquiry(access__identities=tmp_path / "identities.yaml")
    assert levels(access.check_port_certificates(told)) == ["warning"]


def test_keys_that_anybody_may_read_and_chains_out_of_order(authority: Authority, tmp_path: Path) -> None:
    issued = authority.issue("one", ends=60 * DAY)
    look = serving(issued)
    issued.key.chmod(0o644)
    assert levels(access.check_port_certificates(look)) == ["ok", "warning"]
    issued.key.chmod(0o600)
    above, stranger = authority.certificate, Authority(tmp_path / "other", "stranger").certificate
    alone = issued.certificate.read_bytes()
    issued.certificate.write_bytes(alone + above.read_bytes())
    assert levels(access.check_port_certificates(look)) == ["ok"]
    issued.certificate.write_bytes(alone + stranger.read_bytes())
    assert levels(access.check_port_certificates(look)) == ["ok", "failure"]


def linked(issued: Issued, authority: Authority, **more: Any) -> Inquiry:
    issued.key.chmod(0o600)
    return inquiry(
        machine=TODAY,
        cluster__tls__certificate=issued.certificate,
        cluster__tls__key=issued.key,
        cluster__tls__ca=authority.certificate,
        **more,
    )


def test_certificates_of_the_links_to_ranks(authority: Authority, tmp_path: Path) -> None:
    assert levels(access.check_worker_certificates(inquiry())) == ["note"]
    good = authority.issue("ranks", "127.0.0.1", "ranks.internal", ends=60 * DAY)
    assert levels(access.check_worker_certificates(linked(good, authority))) == ["ok"]
    named = linked(good, authority, cluster__tls__server_name="ranks.internal")
    assert "as ranks.internal" in text_of(access.check_worker_certificates(named))
    misnamed = linked(good, authority, cluster__tls__server_name="elsewhere.internal")
    assert levels(access.check_worker_certificates(misnamed)) == ["failure"]
    assert levels(access.check_worker_certificates(linked(good, Authority(tmp_path / "x", "x")))) == ["failure"]
    one_way = authority.issue("servers", purposes=(ExtendedKeyUsageOID.SERVER_AUTH,), ends=60 * DAY)
    assert levels(access.check_worker_certificates(linked(one_way, authority))) == ["failure"]
    soon = authority.issue("soon", ends=3 * DAY)
    assert levels(access.check_worker_certificates(linked(soon, authority))) == ["warning"]


TOKEN = "a" * 64


def test_the_file_of_identities(tmp_path: Path) -> None:
    assert levels(access.check_identities(inquiry())) == ["note"]
    path = tmp_path / "identities.yaml"
    look = inquiry(access__identities=path)
    assert levels(access.check_identities(look)) == ["failure"]
    path.write_text(f"identities:\n- {{name: all, roles: [generate, observe, operate], token_sha256: {TOKEN}}}\n")
    assert levels(access.check_identities(look)) == ["ok"]
    path.write_text(f"identities:\n- {{name: few, roles: [observe], token_sha256: {TOKEN}}}\n")
    assert "nobody has the role generate" in text_of(access.check_identities(look))
    path.write_text(f"identities:\n- {{name: bad, roles: [king], token_sha256: {TOKEN}}}\n")
    assert levels(access.check_identities(look)) == ["failure"]
    assert TOKEN not in text_of(access.check_identities(look))


def test_who_is_known_by_a_certificate_that_nobody_asks_for(authority: Authority, tmp_path: Path) -> None:
    path = tmp_path / "identities.yaml"
    path.write_text(
        "identities:\n- {name: gateway, roles: [generate], certificate: g}\n"
        "- {name: ada, roles: [observe, operate], certificate: a}\n"
        f"- {{name: bob, roles: [generate], certificate: b, token_sha256: {TOKEN}}}\n"
    )
    issued, ca = authority.issue("one"), authority.certificate

    def found(where: str, **more: Any) -> list[tuple[str, str]]:
        findings = access.check_identities(serving(issued, where, access__identities=path, **more))
        return [
            (one.text.partition(": ")[2].split()[0], one.remedy.split()[1].rstrip(","))
            for one in findings
            if one.level is Level.WARNING
        ]

    assert found("operator", operator__tls__client_ca=ca) == [("gateway", "server.tls.client_ca")]
    assert found("server") == [("gateway", "server.tls.client_ca"), *[("ada", "server.tls.client_ca")] * 2]
    assert found("operator") == [("gateway", "server.tls.client_ca"), *[("ada", "operator.tls.client_ca")] * 2]
    assert found("server", server__tls__client_ca=ca) == []


def test_the_audit_log(tmp_path: Path) -> None:
    assert levels(access.check_audit_log(inquiry())) == ["ok"]
    path = tmp_path / "audit.jsonl"
    assert levels(access.check_audit_log(inquiry(access__audit_log=path))) == ["ok"]
    assert not path.exists()
    assert levels(access.check_audit_log(inquiry(access__audit_log=tmp_path / "gone" / "audit.jsonl"))) == ["failure"]
    assert levels(access.check_audit_log(inquiry(access__audit_log=tmp_path))) == ["failure"]


def test_a_certificate_that_is_not_valid_yet(authority: Authority) -> None:
    look = serving(authority.issue("early", begins=timedelta(days=2), ends=9 * DAY))
    assert "not valid before" in text_of(access.check_port_certificates(look))
