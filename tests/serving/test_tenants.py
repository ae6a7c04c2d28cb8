from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.settings import AuthSettings
from serving.tenants import Tenants, Unauthorised


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def tenants(**settings: Any) -> Tenants:
    return Tenants(AuthSettings.model_validate(settings))


ACME, OTHER = "sk-acme-1", "sk-other"
TWO = {"acme": [hashed(ACME), hashed("sk-acme-2")], "other": [hashed(OTHER)]}


def bearer(key: str) -> bytes:
    return b"Bearer " + key.encode()


@pytest.mark.parametrize(("key", "tenant"), [(ACME, "acme"), ("sk-acme-2", "acme"), (OTHER, "other")])
def test_each_key_of_a_tenant_tells_the_tenant(key: str, tenant: str) -> None:
    for required in (True, False):
        assert tenants(tenants=TWO, required=required).tenant_of(bearer(key)) == tenant


@pytest.mark.parametrize("value", [b"bearer sk-acme-1", b"BEARER   sk-acme-1  ", b"Bearer sk-acme-1"])
def test_the_scheme_is_written_in_any_case_and_space_around_the_key_is_none_of_it(value: bytes) -> None:
    assert tenants(tenants=TWO, required=True).tenant_of(value) == "acme"


@pytest.mark.parametrize("value", [None, b"", b"Bearer", b"Bearer ", b"Basic c2stYWNtZS0x", b"sk-acme-1"])
def test_without_a_key_a_request_is_refused_where_one_is_required(value: bytes | None) -> None:
    with pytest.raises(Unauthorised, match=r"no API key: expected .* Bearer <key>") as refused:
        tenants(tenants=TWO, required=True).tenant_of(value)
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    assert tenants(tenants=TWO).tenant_of(value) == ""


@pytest.mark.parametrize("key", ["sk-acme", "sk-acme-1x", "SK-ACME-1", hashed(ACME), "ключ", "acme"])
def test_an_unknown_key_is_nobodys_and_is_not_repeated(key: str) -> None:
    with pytest.raises(Unauthorised, match="not known here") as refused:
        tenants(tenants=TWO, required=True).tenant_of(bearer(key))
    assert refused.value.status == 401
    assert key not in [*refused.value.message.split(), refused.value.code]
    assert tenants(tenants=TWO).tenant_of(bearer(key)) == ""


@given(st.binary(max_size=60))
def test_any_header_is_a_known_key_or_refused(value: bytes) -> None:
    with pytest.raises(Unauthorised):
        tenants(tenants=TWO, required=True).tenant_of(value)


def test_without_tenants_all_are_one_and_the_key_is_the_upstreams() -> None:
    open_to_all = tenants()
    assert open_to_all.tenant_of(bearer("anything")) == open_to_all.tenant_of(None) == ""
    assert not open_to_all.configured
    assert tenants(tenants=TWO).configured


def test_a_token_of_the_admin_api_is_no_tenants_key_and_the_other_way_round() -> None:
    both = tenants(tenants=TWO, admin=[hashed("root-1"), hashed("root-2")], required=True)
    assert both.administered
    assert both.is_admin(bearer("root-1"))
    assert both.is_admin(b"bearer root-2")
    for value in (None, b"", b"Bearer ", bearer("root"), bearer(ACME), bearer(hashed("root-1"))):
        assert not both.is_admin(value)
    with pytest.raises(Unauthorised):
        both.tenant_of(bearer("root-1"))


def test_without_a_token_nobody_is_an_admin() -> None:
    nobody = tenants(tenants=TWO)
    assert not nobody.administered
    assert not nobody.is_admin(bearer(ACME))
    assert not nobody.is_admin(b"Bearer ")


def test_keys_and_their_hashes_do_not_show_in_what_is_kept() -> None:
    kept = repr(vars(tenants(tenants=TWO)))
    assert hashed(ACME) not in kept
    assert repr(bytes.fromhex(hashed(ACME))) not in kept
    assert ACME not in kept
