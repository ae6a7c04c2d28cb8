"""Settings of the data plane. Unknown keys are refused; sizes are bytes, times are seconds."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_serializer, field_validator, model_validator

from serving.hotset import WarmupRules
from serving.knobs import MIB, Knobs, KnobSpace
from serving.latency import UpstreamModel
from serving.policy import CacheRules

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


def _key_hash(value: str) -> str:
    if len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise ValueError('expected the SHA-256 of a key as 64 hexadecimal digits (printf %s "$KEY" | sha256sum)')
    return value


KeyHash = Annotated[str, AfterValidator(_key_hash)]
Port = Annotated[int, Field(ge=0, le=65535)]


def _endpoint(value: str) -> str:
    host, colon, port = value.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (colon and bare and port.isascii() and port.isdigit() and int(port) <= 65535) or (":" in bare) != (bare != host):
        raise ValueError(f"expected host:port, an IPv6 address in brackets, got {value!r}")
    return value


Endpoint = Annotated[str, AfterValidator(_endpoint)]


class Settings(BaseModel):
    """Base of every settings model: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"expected an http:// or https:// URL, got {value!r}")
    return value.rstrip("/")


class KnobSettings(Settings):
    """One setting of the three knobs.

    Attributes:
        cache_size: Byte budget of the arm across the cluster.
        ttl: Time to live, seconds; null means never.
        warmup_ratio: Share of the hot set that is kept warm.
    """

    cache_size: Annotated[int, Field(ge=0)] = 64 * MIB
    ttl: Annotated[float, Field(gt=0.0)] | None = 3600.0
    warmup_ratio: Share = 0.0

    def knobs(self) -> Knobs:
        """Return the knobs as the cache takes them."""
        return Knobs(self.cache_size, math.inf if self.ttl is None else self.ttl, self.warmup_ratio)


class SpaceSettings(Settings):
    """Bounds and grid of the knobs; see :class:`serving.knobs.KnobSpace`."""

    min_size: Annotated[int, Field(gt=0)] = 1 * MIB
    max_size: Annotated[int, Field(gt=0)] = 1024 * MIB
    min_ttl: Seconds = 10.0
    max_ttl: Seconds = 86_400.0
    max_warmup: Share = 0.5
    size_steps: Annotated[int, Field(ge=2, le=64)] = 16
    ttl_steps: Annotated[int, Field(ge=2, le=64)] = 8
    warmup_steps: Annotated[int, Field(ge=2, le=64)] = 6

    @model_validator(mode="after")
    def _consistent(self) -> SpaceSettings:
        self.space()
        return self

    def space(self) -> KnobSpace:
        """Return the knob space."""
        return KnobSpace(**self.model_dump())


class ArmSettings(Settings):
    """One arm: its share of the keys and its knobs until the tuner writes others."""

    share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    knobs: KnobSettings = KnobSettings()


class GuardSettings(Settings):
    """What two questions must have in common, beside their embedding, to share an answer; each can be turned off.

    Attributes:
        numbers: The same numbers with the same units, in the same order.
        negation: The same negations.
        polarity: The same of opposite words: on or off, with or without, before or after.
        entities: The same named entities.
        words: More in common than all but one word, unless the two words mean the same.
        order: The same order of what is compared or moved: "from A to B" is not "from B to A".
        edit_distance: Greatest edit distance over the longer text's length, 0..1; null: not looked at.
    """

    numbers: bool = True
    negation: bool = True
    polarity: bool = True
    entities: bool = True
    words: bool = True
    order: bool = True
    edit_distance: Share | None = None


class VectorSettings(Settings):
    """Where the vectors are kept.

    Attributes:
        kind: ``usearch`` in process; ``faiss`` in process, compressed, for above a million entries; ``milvus`` and ``chroma``
            are services that all replicas share.
        url: Of the service: ``http://...``, or a file for Milvus Lite; null for those in process.
        token: Sent to the service.
        deadline: Seconds that a call may take before the lookup goes on as a miss.
    """

    kind: Literal["usearch", "faiss", "milvus", "chroma"] = "usearch"
    url: str | None = None
    token: SecretStr | None = None
    deadline: Seconds = 0.25

    @model_validator(mode="after")
    def _located(self) -> VectorSettings:
        service = self.kind in ("milvus", "chroma")
        if service and self.url is None:
            raise ValueError(f"url: expected the address of {self.kind}, got null")
        if not service and self.url is not None:
            raise ValueError(f"url: {self.kind} runs in process and has none; got {self.url!r}")
        return self

    @field_serializer("token", when_used="json")
    def _reveal(self, value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()


class LshSettings(Settings):
    """The semantic bucket: a signature of the embedding by random hyperplanes.

    Attributes:
        bits: Length of the signature.
        buckets: Number of buckets, a power of two.
        seed: Draws the hyperplanes.
        components: File of principal components that vectors are projected on first (``serving.meaning.lsh``), the same for all
            replicas; null: none. Questions of one field then fall into more buckets.
        arms: Whether the bucket, not the key, assigns a request to an arm, so that paraphrases meet the same arm. Each request
            then needs its embedding before it can be looked up.
    """

    bits: Annotated[int, Field(ge=8, le=64, multiple_of=8)] = 64
    buckets: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    seed: int = 0
    components: Path | None = None
    arms: bool = False

    @field_validator("buckets")
    @classmethod
    def _power(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"expected a power of two, got {value}")
        return value


class SemanticSettings(Settings):
    """Answers by meaning.

    Attributes:
        enabled: Whether a miss on the exact key is looked up by meaning. Costs an embedding per miss.
        threshold: Least cosine similarity of two questions that may share an answer.
        max_error: Largest share of wrong answers by meaning, 0..1: each entry's own acceptance is then learned from verified
            outcomes, and ``threshold`` is a floor. null: the threshold alone decides.
        error_over: Of what ``max_error`` is a share: ``lookups``: all that were looked up by meaning; ``answers``: those
            that were answered by meaning, which is stricter.
        verify: How an answer given anew is compared with the one that would have been served: ``exact``: the same text;
            ``embedding``: cosine of at least ``verify_similarity``.
        verify_similarity: See ``verify``.
        deadline: Seconds an embedding may take before the lookup goes on as a miss.
        collapse: Whether a miss waits for the answer to a near-identical question that is under way.
        guards: What has to agree beside the embedding.
        lsh: The semantic bucket.
        vectors: Where the vectors are kept.
    """

    enabled: bool = False
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] = 0.9
    max_error: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    error_over: Literal["lookups", "answers"] = "lookups"
    verify: Literal["exact", "embedding"] = "exact"
    verify_similarity: Share = 0.9
    deadline: Seconds = 0.5
    collapse: bool = True
    guards: GuardSettings = GuardSettings()
    lsh: LshSettings = LshSettings()
    vectors: VectorSettings = VectorSettings()


class AdmissionSettings(Settings):
    """Which answers are kept; only complete ones ever are.

    Attributes:
        tool_calls: Whether answers that call tools are kept.
        max_temperature: Answers to a higher temperature are not kept; null: any is.
        max_entry_bytes: Largest answer that is kept.
        min_logprob: Answers whose mean token log-probability is known and below this are not kept; null: any are.
        heed_no_store: Whether answers that the upstream marks ``Cache-Control: no-store`` are not kept. Some hosted models mark
            all of theirs.
    """

    tool_calls: bool = False
    max_temperature: Annotated[float, Field(ge=0.0)] | None = 1.0
    max_entry_bytes: Annotated[int, Field(gt=0)] = 4 * MIB
    min_logprob: Annotated[float, Field(le=0.0)] | None = -2.3
    heed_no_store: bool = False


class CallerSettings(Settings):
    """What callers may ask of the cache, by ``Cache-Control`` or the body's ``cache`` object.

    Attributes:
        directives: Whether they are heeded at all.
        namespaces: Whether a caller may divide its cache by a name of its own.
        min_ttl: Least TTL of an entry that a caller may ask for, seconds. The arm's TTL is the greatest.
        debug: Whether ``x-cache-...`` headers are sent; ``Cache-Status`` and ``Age`` always are.
    """

    directives: bool = True
    namespaces: bool = True
    min_ttl: Annotated[float, Field(ge=0.0)] = 0.0
    debug: bool = True


class StreamSettings(Settings):
    """Streamed answers.

    Attributes:
        usage: Whether the upstream is asked for the tokens of a stream, which the tuner needs for its prices; a client that did
            not ask does not see them.
        resume: How an interrupted stream goes on for a client that comes back: ``replay``: the model is asked again, and the
            rest is passed on if it repeats in content what the client has; ``continue``: the model continues the text
            (vLLM's ``continue_final_message``).
        grace: Seconds that a stream runs on after its last reader went away, so that one who comes back finds it.
        keep_partial: Whether interrupted streams are kept for such readers.
    """

    usage: bool = True
    resume: Literal["replay", "continue"] = "replay"
    grace: Annotated[float, Field(ge=0.0)] = 2.0
    keep_partial: bool = True


class AuthSettings(Settings):
    """Who may ask. Keys are given as SHA-256 in hex: ``printf %s "$KEY" | sha256sum``.

    Attributes:
        required: Whether a request without a known key is refused.
        tenants: Hashes of the keys by tenant. Tenants never share an answer. Without tenants all callers share one cache, and
            their ``Authorization`` is the upstream's to judge.
        admin: Hashes of the tokens of the admin API; without one it is off.
    """

    required: bool = False
    tenants: dict[Name, tuple[KeyHash, ...]] = Field(default_factory=dict)
    admin: tuple[KeyHash, ...] = ()

    @model_validator(mode="after")
    def _somebody(self) -> AuthSettings:
        if self.required and not self.tenants:
            raise ValueError("tenants: expected at least one tenant with keys, since keys are required; got none")
        hashes = [value for values in self.tenants.values() for value in values] + list(self.admin)
        if len(set(hashes)) < len(hashes):
            raise ValueError("tenants and admin: expected each key's hash once")
        return self


class StorageSettings(Settings):
    """How entries are kept in Redis.

    Attributes:
        encryption_key: 32 bytes in base64: answers and metadata are encrypted (AES-256-GCM) before they leave the process.
            Vectors are not, since they are searched; they tell of what a text is about.
        tls_ca: Certificates that Redis' own is checked against, for ``rediss://``; null: the system's.
        tls_cert: The client's certificate.
        tls_key: Its key.
    """

    encryption_key: SecretStr | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @field_validator("encryption_key")
    @classmethod
    def _sized(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            try:
                size = len(base64.b64decode(value.get_secret_value(), validate=True))
            except ValueError:
                size = -1
            if size != 32:
                raise ValueError("expected 32 bytes in base64 (make them with: openssl rand -base64 32)")
        return value

    @field_serializer("encryption_key", when_used="json")
    def _reveal(self, value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()


class RulesSettings(Settings):
    """Rules of the cache that are not knobs.

    Attributes:
        l1_share: Share of an arm's budget that may be resident in the memory tier.
        ttl_jitter: Width of the deterministic jitter on the TTL of each key, against expiry storms.
        staleness_half_life: Seconds after which an answer is outdated with probability one half; null means never.
        stale_while_revalidate: Seconds past its TTL that an entry is still served while it is refreshed (RFC 5861).
        stale_if_error: Seconds past its TTL that an entry is still served where the upstream fails (RFC 5861).
        hit_extends_ttl: Whether a hit begins an entry's life anew.
        semantic: Answers by meaning.
    """

    l1_share: Share = 0.25
    ttl_jitter: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    staleness_half_life: Annotated[float, Field(gt=0.0)] | None = None
    stale_while_revalidate: Annotated[float, Field(ge=0.0)] = 0.0
    stale_if_error: Annotated[float, Field(ge=0.0)] = 0.0
    hit_extends_ttl: bool = False
    semantic: SemanticSettings = SemanticSettings()

    def rules(self) -> CacheRules:
        """Return the rules as the decision core takes them."""
        return CacheRules(
            l1_share=self.l1_share,
            ttl_jitter=self.ttl_jitter,
            staleness_half_life=self.half_life,
            semantic_threshold=self.semantic.threshold,
            stale_while_revalidate=self.stale_while_revalidate,
            stale_if_error=self.stale_if_error,
            hit_extends_ttl=self.hit_extends_ttl,
        )

    @property
    def half_life(self) -> float:
        """``staleness_half_life`` as a number; ``inf`` for never."""
        return math.inf if self.staleness_half_life is None else self.staleness_half_life


class UpstreamSettings(Settings):
    """The model behind the cache: any OpenAI-compatible server.

    Attributes:
        base_url: As OpenAI's clients take it, with the version: ``https://api.openai.com/v1``.
        api_key: Sent as a bearer token. Without one the client's own ``Authorization`` header is passed on, unless there are
            tenants, whose keys are the gateway's; warm-up, which has no client, then goes without.
        timeout: Seconds for one whole call.
        connect_timeout: Seconds to connect.
        first_byte_timeout: Seconds until the first byte of an answer; null: ``timeout`` alone.
        idle_timeout: Seconds between two bytes of an answer; null: ``timeout`` alone.
        retries: How often a call that failed before its first byte is made again (connection errors, 502, 503, 504).
        backoff: Seconds before the first retry; doubled each time, with jitter. ``Retry-After`` is heeded up to ``max_backoff``.
        max_backoff: Longest wait between two tries.
        max_inflight: Calls of one replica at the same time; null: no limit.
        max_waiting: Calls that may wait for their turn; more are refused with 429 and ``Retry-After``.
        max_wait: Longest wait for a turn, seconds.
        forward_headers: Request headers passed on to the upstream, besides ``Content-Type`` and ``Authorization``.
    """

    base_url: str = "http://127.0.0.1:8001/v1"
    api_key: SecretStr | None = None
    timeout: Seconds = 600.0
    connect_timeout: Seconds = 5.0
    first_byte_timeout: Seconds | None = None
    idle_timeout: Seconds | None = None
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    backoff: Seconds = 0.1
    max_backoff: Seconds = 5.0
    max_inflight: Annotated[int, Field(ge=1)] | None = None
    max_waiting: Annotated[int, Field(ge=0)] = 100
    max_wait: Seconds = 30.0
    forward_headers: tuple[str, ...] = ("openai-organization", "openai-project", "traceparent", "x-llm-sim-output-tokens")

    _url = field_validator("base_url")(_http_url)

    @field_validator("forward_headers")
    @classmethod
    def _lower(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in value)

    @field_serializer("api_key", when_used="json")
    def _reveal(self, value: SecretStr | None) -> str | None:
        # Replicas are built from the JSON form on other machines, so it has to hold the key; repr and logs still hide it.
        return None if value is None else value.get_secret_value()


class WarmupSettings(Settings):
    """Background refreshing of the hot set; the share refreshed is the knob ``warmup_ratio``.

    Attributes:
        capacity: Keys remembered per arm.
        half_life: Seconds in which the weight of an access halves.
        min_score: Least decayed number of accesses for a key to be hot.
        period: Seconds between two rounds.
        refresh_ahead: Share of the TTL before its end in which an entry is refreshed already.
        refreshes_per_second: Rate of refreshes per arm.
        burst: Refreshes that may be made at once after a quiet time.
        max_inflight: Refreshes of one replica under way at the same time: what keeps them from crowding out users.
        max_bytes: Bytes of request bodies that one replica remembers per arm, to send them again; the coldest go first.
    """

    capacity: Annotated[int, Field(ge=1)] = 1024
    half_life: Seconds = 600.0
    min_score: Annotated[float, Field(gt=0.0)] = 1.5
    period: Seconds = 1.0
    refresh_ahead: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    refreshes_per_second: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 5.0
    burst: Annotated[int, Field(ge=1)] = 20
    max_inflight: Annotated[int, Field(ge=1)] = 4
    max_bytes: Annotated[int, Field(ge=1)] = 32 * MIB

    def rules(self) -> WarmupRules:
        """Return the rules of the algorithm, which the simulator shares."""
        return WarmupRules(**self.model_dump(exclude={"max_inflight", "max_bytes"}))


class GhostSettings(Settings):
    """The shadow that predicts every other setting.

    Attributes:
        enabled: Whether it is kept.
        max_keys: Keys tracked per arm; 8,000 take about 1.7 MB on the default grid.
        rate: Upper bound of the share of keys that is tracked; below it the rate follows ``max_keys``.
        salt: Of the spatial sample, so that two deployments sample different keys.
        rotate_every: Seconds after which a sample with another salt takes over; null for never. While the next one is warmed up,
            beside the one that reports, the ghost takes twice the memory and time.
        window: Seconds between two exports of its curve, entropy and drift.
    """

    enabled: bool = True
    max_keys: Annotated[int, Field(ge=16)] = 8000
    rate: Annotated[float, Field(ge=1e-6, le=1.0)] = 1.0
    salt: int = 0
    rotate_every: Seconds | None = None
    window: Seconds = 5.0


class MemorySettings(Settings):
    """The memory tier.

    Attributes:
        shared: Whether all replicas of a node share one arena; else each has memory of its own. An arena that cannot be opened
            is told of, and the replica goes on with memory of its own.
        path: The arena's file; null: ``/dev/shm/cachepilot-<namespace>-<user id>``, or with ``cachepilot serve`` one in
            ``/dev/shm`` that goes with it. Replicas that name the same file share it.
        size: Bytes of the file, memory that is taken as entries come; null: enough for the largest budgets of all arms, and
            half of the file system at most. One that is used by nobody is replaced where the size changed.
        entry_bytes: What an entry is expected to have on average; sets the size of the index.
    """

    shared: bool = True
    path: Path | None = None
    size: Annotated[int, Field(ge=64 * 1024, le=256 * 1024 * MIB)] | None = None
    entry_bytes: Annotated[int, Field(ge=64, le=MIB)] = 1024

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is not None and "\0" in str(value):
            raise ValueError(f"expected a path, which has no null characters; got {str(value)!r}")
        if value is not None and not value.is_absolute():
            raise ValueError(f"expected an absolute path, since replicas have other working directories; got {str(value)!r}")
        return value


class NeighbourSettings(Settings):
    """Other nodes' arenas, which are asked before Redis is.

    Attributes:
        listen: ``host:port`` at which this node's arena is offered to the others; null: no neighbours at all.
        advertise: ``host:port`` by which the others reach it; null: ``listen``, if that names one address and one port.
        peers: ``host:port`` of every node; none: they find each other through Redis.
        secret: Shared by all nodes, at least 16 characters; needed with ``listen``. Who has it may read the arena and offer
            entries.
        transport: ``rdma``, ``tcp``, or ``auto``: RDMA where both sides have it, else TCP. Both carry entries in the clear.
        device: The RDMA device, with its port and the index of its GID where need be (``mlx5_0:1:3``); null: the first that is
            usable.
        deadline: Seconds that a lookup waits for a neighbour before it goes on to Redis.
        inbox_slots: Entries that one neighbour may have offered and this node not yet taken.
        slot_bytes: Largest entry that is offered, in its stored form.
    """

    listen: Endpoint | None = None
    advertise: Endpoint | None = None
    peers: tuple[Endpoint, ...] = ()
    secret: SecretStr | None = None
    transport: Literal["auto", "rdma", "tcp"] = "auto"
    device: str | None = None
    deadline: Seconds = 0.05
    inbox_slots: Annotated[int, Field(ge=1, le=128)] = 64
    slot_bytes: Annotated[int, Field(ge=4096, le=16 * MIB, multiple_of=64)] = 65536

    @field_validator("secret")
    @classmethod
    def _long(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < 16:
            raise ValueError("expected at least 16 characters (make them with: openssl rand -hex 32)")
        return value

    @model_validator(mode="after")
    def _together(self) -> NeighbourSettings:
        if self.listen is not None and self.secret is None:
            raise ValueError("secret: expected one, since listen is set: neighbours prove to each other that they have it")
        if self.listen is not None and self.advertise is None:
            host, _, port = self.listen.rpartition(":")
            if host in ("0.0.0.0", "[::]", "*") or int(port) == 0:
                raise ValueError(
                    "advertise: expected host:port by which the other nodes reach this one, "
                    f"since listen is {self.listen!r}; got null"
                )
        if self.listen is None and (given := [name for name in ("advertise", "peers") if getattr(self, name)]):
            raise ValueError(f"listen: expected host:port, since {' and '.join(given)} is given; got null")
        return self

    @field_serializer("secret", when_used="json")
    def _reveal(self, value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()


class GatewaySettings(Settings):
    """The whole data plane.

    Attributes:
        namespace: Separates caches and configurations that share a Redis.
        generation: Part of every answer's identity: under another one nothing that was stored before is found. For a model that
            changed behind its name; what is unreachable is evicted in time.
        redis_url: ``redis://``, ``rediss://`` or ``unix://``; null: memory alone, for one replica.
        redis_deadline: Seconds that a lookup waits for Redis before it goes on as a miss; well below what a miss costs.
        arms: Arms by name; shares sum to 1.
        salt: Of the assignment of keys to arms.
        space: Bounds of the knobs.
        rules: Rules that are not knobs.
        memory: The memory tier.
        neighbours: Other nodes' arenas.
        upstream: The model.
        warmup: Background refreshing.
        ghost: The shadow cache.
        replicas: Gateway replicas.
        host: Address the ingress listens on.
        port: Its port; 0 takes a free one.
        metrics_port: Port on which the node exports metrics, where Ray is started for the gateway alone; 0 takes a free one.
        access_log: Folder of the access log; null for none.
        flush_interval: Seconds between two flushes of metrics and access log.
        max_request_bytes: Largest request body that is accepted.
        admission: Which answers are kept.
        callers: What callers may ask of the cache.
        streams: Streamed answers.
        auth: Who may ask.
        storage: How entries are kept in Redis.
        haproxy: Whether the HAProxy ingress is used where it is available.
    """

    namespace: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "cachepilot"
    generation: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    redis_url: str | None = None
    redis_deadline: Seconds = 0.25
    arms: dict[Name, ArmSettings] = Field(default_factory=lambda: {"control": ArmSettings()}, min_length=1)
    salt: str = ""
    space: SpaceSettings = SpaceSettings()
    rules: RulesSettings = RulesSettings()
    memory: MemorySettings = MemorySettings()
    neighbours: NeighbourSettings = NeighbourSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    warmup: WarmupSettings = WarmupSettings()
    ghost: GhostSettings = GhostSettings()
    replicas: Annotated[int, Field(ge=1)] = 1
    host: str = "127.0.0.1"
    port: Port = 8000
    metrics_port: Port = 8002
    access_log: Path | None = None
    flush_interval: Seconds = 1.0
    max_request_bytes: Annotated[int, Field(gt=0)] = 10 * MIB
    admission: AdmissionSettings = AdmissionSettings()
    callers: CallerSettings = CallerSettings()
    streams: StreamSettings = StreamSettings()
    auth: AuthSettings = AuthSettings()
    storage: StorageSettings = StorageSettings()
    haproxy: bool = True

    @field_validator("redis_url")
    @classmethod
    def _redis(cls, value: str | None) -> str | None:
        if value is not None and urlsplit(value).scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"expected a redis://, rediss:// or unix:// URL, got {value!r}")
        return value

    @model_validator(mode="after")
    def _shares(self) -> GatewaySettings:
        total = sum(arm.share for arm in self.arms.values())
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            shares = {name: arm.share for name, arm in self.arms.items()}
            raise ValueError(f"arms: expected shares that sum to 1, got {shares} (sum {total:g})")
        if self.replicas > 1 and self.redis_url is None:
            raise ValueError(
                f"redis_url: expected a Redis URL, since {self.replicas} replicas share one cache; got null "
                "(the Redis that `cachepilot serve` brings is for one: start a redis-server and name it)"
            )
        if self.neighbours.listen is not None and not self.memory.shared:
            raise ValueError("neighbours.listen: expected memory.shared, since what neighbours read is the arena; got false")
        if self.neighbours.listen is not None and self.redis_url is None:
            raise ValueError("neighbours.listen: expected a redis_url, since by it nodes hear of what was removed; got null")
        if self.neighbours.listen is not None and self.storage.encryption_key is not None:
            raise ValueError("neighbours.listen: expected no storage.encryption_key, since entries go to neighbours in the clear")
        return self

    @property
    def shares(self) -> dict[str, float]:
        """Share of the keys by arm."""
        return {name: arm.share for name, arm in self.arms.items()}

    @property
    def initial_knobs(self) -> dict[str, Knobs]:
        """Knobs by arm until the tuner writes others."""
        return {name: arm.knobs.knobs() for name, arm in self.arms.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the JSON-ready form from which the same settings can be built, the API key included."""
        return self.model_dump(mode="json")


class LlmSimSettings(Settings):
    """The simulated model server.

    Attributes:
        host: Address it listens on.
        port: Its port; 0 takes a free one.
        model: The name it serves; a request for another name is a 404, as with a real server.
        revision: Changes every answer, as a new checkpoint does.
        slots: Requests that run at the same time.
        ttft: Seconds to the first token.
        tpot: Seconds per output token of a request that runs alone.
        contention: Relative slowdown per token when all slots are busy.
        min_output_tokens: Least length of an answer whose length is not given.
        max_output_tokens: Greatest length of such an answer.
        kv_cache_tokens: Tokens that fit into the KV cache, for the usage gauge.
        failure_rate: Share of completions that are answered with 500 or 503 (half of them each), to test what is in front of it.
        hang_rate: Share of completions that are never answered.
        cut_rate: Share of completions of which the second half is missing, ``finish_reason`` and ``[DONE]`` included.
        fault_seed: Of the choice which completions fail, hang or are cut: a function of it and of their number since the start.
        log_level: Of the HTTP server.
    """

    host: str = "127.0.0.1"
    port: Port = 8001
    model: Annotated[str, Field(min_length=1)] = "llm-sim"
    revision: str = "1"
    slots: Annotated[int, Field(ge=1)] = 8
    ttft: Annotated[float, Field(ge=0.0)] = 0.08
    tpot: Annotated[float, Field(ge=0.0)] = 0.002
    contention: Annotated[float, Field(ge=0.0)] = 0.5
    min_output_tokens: Annotated[int, Field(ge=1)] = 16
    max_output_tokens: Annotated[int, Field(ge=1)] = 256
    kv_cache_tokens: Annotated[int, Field(ge=1)] = 65_536
    failure_rate: Share = 0.0
    hang_rate: Share = 0.0
    cut_rate: Share = 0.0
    fault_seed: int = 0
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "warning"

    @model_validator(mode="after")
    def _ordered(self) -> LlmSimSettings:
        if self.min_output_tokens > self.max_output_tokens:
            raise ValueError(
                f"expected min_output_tokens <= max_output_tokens, got {self.min_output_tokens} and {self.max_output_tokens}"
            )
        if (faulty := self.failure_rate + self.hang_rate + self.cut_rate) > 1.0:
            raise ValueError(f"expected failure_rate + hang_rate + cut_rate <= 1, got {faulty:g}")
        return self

    def upstream_model(self) -> UpstreamModel:
        """Return the latency model."""
        return UpstreamModel(self.slots, self.ttft, self.tpot, self.contention)
