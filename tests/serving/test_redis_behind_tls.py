"""A Redis behind TLS, and its addresses: certificates are checked on both sides, passwords are not told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from serving.knobs import Knobs
from serving.redis_config_store import RedisConfigStore
from serving.redis_url import address, secured, shown
from serving.settings import GatewaySettings
from serving.tiers.base import TierUnavailable
from serving.tiers.redis import RedisTier
from tests.serving.certificates import Authority, Pair, redis_behind_tls
from tests.serving.entries import entry, key


class Site:
    """A Redis behind TLS with everything that is needed to reach it, and a stranger's certificates."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder, "authority")
        self.server = self.authority.issue("server")
        self.client = self.authority.issue("client")
        self.stranger = Authority(folder, "stranger")
        self.strangers_client = self.stranger.issue("strangers-client")
        self.url = ""

    def address(self, *, ca: Path | None = None, client: Pair | None = None) -> str:
        client = client or self.client
        return secured(self.url, ca=ca or self.authority.cert, cert=client.cert, key=client.key)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("tls"))
    with redis_behind_tls(tmp_path_factory.mktemp("redis"), made.authority, made.server, made.client) as made.url:
        yield made


@asynccontextmanager
async def opened(url: str, namespace: str) -> AsyncIterator[RedisTier]:
    tier = RedisTier(url, namespace, read_deadline=10, write_deadline=10)
    try:
        yield tier
    finally:
        await tier.close()


async def test_entries_travel_over_tls_with_certificates_on_both_sides(site: Site, namespace: str) -> None:
    async with opened(site.address(), namespace) as tier:
        await tier.resize("a", 10_000)
        await tier.put("a", entry(1))
        assert await tier.get("a", key(1)) == entry(1)
        changes = tier.changes()
        assert (await anext(changes)).kind == "gap", "the feed of changes goes the same way"


async def test_the_settings_name_the_certificates_for_every_client(site: Site, namespace: str) -> None:
    settings = GatewaySettings.model_validate(
        {
            "redis_url": site.url,
            "storage": {
                "tls_ca": str(site.authority.cert), "tls_cert": str(site.client.cert), "tls_key": str(site.client.key),
            },
        }
    )  # fmt: skip
    url = address(settings)
    assert url is not None
    store = RedisConfigStore(url, namespace)
    try:
        await store.write({"a": Knobs(1 << 20, 60.0, 0.0)}, expected_version=0, author="test", reason="", now=1.0)
        desired = await store.read()
        assert desired is not None
        assert desired.arms["a"].ttl == 60.0
    finally:
        await store.close()
    assert address(GatewaySettings()) is None
    assert address(GatewaySettings(redis_url="redis://127.0.0.1")) == "redis://127.0.0.1"


async def test_a_server_that_the_authority_did_not_certify_is_not_talked_to(site: Site, namespace: str) -> None:
    async with opened(site.address(ca=site.stranger.cert), namespace) as tier:
        with pytest.raises(TierUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await tier.get("a", key(1))


async def test_a_client_that_the_authority_did_not_certify_gets_nothing(site: Site, namespace: str) -> None:
    for url in (site.address(client=site.strangers_client), secured(site.url, ca=site.authority.cert)):
        async with opened(url, namespace) as tier:
            with pytest.raises(TierUnavailable):
                await tier.get("a", key(1))


async def test_a_certificate_for_another_address_is_refused(tmp_path: Path, namespace: str) -> None:
    authority = Authority(tmp_path, "authority")
    server, client = authority.issue("server", address="192.0.2.1"), authority.issue("client")
    with redis_behind_tls(tmp_path, authority, server, client) as url:
        async with opened(secured(url, ca=authority.cert, cert=client.cert, key=client.key), namespace) as tier:
            with pytest.raises(TierUnavailable, match="IP address mismatch"):
                await tier.get("a", key(1))


async def test_without_tls_a_server_that_wants_it_is_a_miss(site: Site, namespace: str) -> None:
    async with opened(site.url.replace("rediss://", "redis://"), namespace) as tier:
        with pytest.raises(TierUnavailable):
            await tier.get("a", key(1))


async def test_a_password_is_in_no_message(namespace: str) -> None:
    tier = RedisTier("redis://someone:secret@127.0.0.1:1/0?client_name=secret", namespace)
    with pytest.raises(TierUnavailable, match=r"redis://127\.0\.0\.1:1/0 ") as refused:
        await tier.get("a", key(1))
    assert "secret" not in str(refused.value)
    await tier.close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://user:p@ss@host:1/2", "redis://host:1/2"),
        ("rediss://host?ssl_keyfile=/a", "rediss://host"),
        ("unix:///tmp/redis.sock?db=1", "unix:///tmp/redis.sock"),
        ("unix://user:secret@/tmp/redis.sock", "unix:///tmp/redis.sock"),
        ("redis://host", "redis://host"),
    ],
)
def test_an_address_is_shown_without_user_password_and_options(url: str, expected: str) -> None:
    assert shown(url) == expected


def test_certificates_go_into_the_address_and_keep_what_is_there() -> None:
    full = secured("rediss://u:p@host:1/2?protocol=3", ca=Path("/a b/ca.pem"), cert=Path("/c&d.pem"), key=Path("/k.key"))
    assert full == (
        "rediss://u:p@host:1/2?protocol=3&ssl_ca_certs=%2Fa+b%2Fca.pem&ssl_certfile=%2Fc%26d.pem&ssl_keyfile=%2Fk.key"
    )
    tier = RedisTier(full)
    given = tier._redis.connection_pool.connection_kwargs
    assert (given["ssl_ca_certs"], given["ssl_certfile"], given["protocol"]) == ("/a b/ca.pem", "/c&d.pem", 3)


def test_an_address_with_options_that_do_not_exist_is_refused_at_once_not_at_each_request() -> None:
    with pytest.raises(ValueError, match=r"redis tier: redis://host: .*ssl_keyfle"):
        RedisTier("redis://u:secret@host?ssl_keyfle=/k.pem")


def test_certificates_for_what_is_not_encrypted_are_refused() -> None:
    with pytest.raises(ValueError, match="expected rediss:// since certificates are given, got redis://host"):
        secured("redis://u:secret@host", ca=Path("/ca.pem"))
    with pytest.raises(ValueError, match="expected a certificate for the key /k"):
        secured("rediss://host", key=Path("/k.pem"))
    assert secured("redis://host") == "redis://host"
