"""Control messages: frozen values in closed unions.

Every control frame, once opened, holds exactly one :data:`Envelope` value. A client opens a request; the server sends any
number of Progress messages and ends it with one Reply or Failure; the client may send Update messages while it is open, or
Cancel. There are no method names on the wire: the body's type is the dispatch key.

All constructors are used with keyword arguments. Byte strings have exact lengths where the meaning fixes them; collections
are bounded by :mod:`wire.limits`. Violations surface as ``msgspec.ValidationError`` in the decoder, which
:mod:`wire.codec` turns into RemoteProtocolError.
"""

from enum import IntEnum
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from wire import limits
from wire.errors import FailureCode
from wire.job_seal import PROOF_BYTES, SEALED_PROMPT_OVERHEAD_BYTES
from wire.text import ASCII, LINE, NODE_ID, NODE_ID_CHARACTERS_MAX, OPTIONAL_NODE_ID, OPTIONAL_WORD, WORD

Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
Id16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Key32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
Name = Annotated[str, Meta(min_length=1, max_length=limits.NAME_CHARACTERS_MAX, pattern=LINE)]
OptionalName = Annotated[str, Meta(max_length=limits.NAME_CHARACTERS_MAX, pattern=LINE)]
NodeName = Annotated[str, Meta(max_length=NODE_ID_CHARACTERS_MAX, pattern=NODE_ID)]
OptionalNodeName = Annotated[str, Meta(max_length=NODE_ID_CHARACTERS_MAX, pattern=OPTIONAL_NODE_ID)]
"""Also of tenants."""
Word = Annotated[str, Meta(max_length=32, pattern=WORD)]
"""A role, or another name of a closed vocabulary."""
OptionalWord = Annotated[str, Meta(max_length=32, pattern=OPTIONAL_WORD)]
Ascii = Annotated[str, Meta(max_length=limits.NAME_CHARACTERS_MAX, pattern=ASCII)]
"""A version, platform or format; may be empty."""
Text = Annotated[str, Meta(max_length=limits.TEXT_CHARACTERS_MAX)]
"""Free text: whoever shows it cleans it (:mod:`wire.text`)."""
TextLine = Annotated[str, Meta(max_length=limits.TEXT_CHARACTERS_MAX, pattern=LINE)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
PackedTokens = Annotated[bytes, Meta(max_length=limits.PROMPT_TOKENS_MAX * limits.TOKEN_BYTES)]
"""Tokens as packed little-endian int32."""
SealedPrompt = Annotated[
    bytes, Meta(max_length=limits.PROMPT_TOKENS_MAX * limits.TOKEN_BYTES + SEALED_PROMPT_OVERHEAD_BYTES)
]
"""Packed tokens under a seal that only holders of the tenant's key open (:mod:`wire.job_seal`)."""
PackedHashes = Annotated[bytes, Meta(max_length=limits.BLOCKS_MAX * limits.HASH_BYTES)]
"""Block hashes, 32 bytes each, in prefix order."""
CardDigest = Annotated[bytes, Meta(max_length=limits.CARD_DIGEST_BYTES_MAX)]
Bitmap = Annotated[bytes, Meta(max_length=limits.BLOCKS_MAX // 8 + 1)]
"""One bit an item, least significant bit of byte 0 first."""
ValueBytes = Literal[1, 2, 4]
"""Width of a value in a part, for the byte planes of a link encoding; 1 also when it is unknown or the parts are packed."""


class PartKind(IntEnum):
    """Which layer group's state of a block a part holds (design: parts by layer group)."""

    FULL = 0
    """K/V rows of the full-attention layers."""
    WINDOW = 1
    """K/V rows of sliding-window, chunked-attention and sink+window layers."""
    STATE = 2
    """Checkpoint of recurrent or convolution layers at the block's last token; can't be sliced."""


class CipherSuite(IntEnum):
    """How bulk chunks are sealed; negotiated for each transfer."""

    SECRETBOX = 1
    AES_256_GCM = 2


class LinkCodec(IntEnum):
    """How the data chunks of a transfer are packed before they are sealed; chosen for each link, no part of what a part is.

    The asker names what it wants, the grant what is used; NONE is always a right answer. Layout: kakeya_zmq.codecs.link.
    """

    NONE = 0
    ZLIB = 1
    ZSTD = 2


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    pass


class PartRef(_Message, frozen=True, kw_only=True, gc=False):
    """Names one part."""

    block_hash: Hash
    kind: PartKind


class PartMeta(_Message, frozen=True, kw_only=True, gc=False):
    """Describes one part without its bytes.

    ``start`` and ``token_count`` are absolute token positions and lengths: the part belongs to the tokens
    [start, start + token_count). A block shorter than the fingerprint's block size is a *tail*; it is found through
    ``parent_hash``. ``digest`` is the SHA-256 of the canonical stored bytes, checked when a publish is accepted.
    """

    block_hash: Hash
    parent_hash: Hash
    kind: PartKind
    start: Count
    token_count: Annotated[int, Meta(ge=1, le=limits.BLOCK_TOKENS_MAX)]
    length_bytes: Annotated[int, Meta(ge=1, le=limits.PART_BYTES_MAX)]
    digest: Hash
    checksum: Annotated[bytes, Meta(min_length=8, max_length=8)]
    """XXH3-64 of the stored bytes, big-endian: finds damaged memory wherever the part is used, at no cost worth naming."""

    @property
    def ref(self) -> PartRef:
        return PartRef(block_hash=self.block_hash, kind=self.kind)

    @property
    def end(self) -> int:
        """Position after the last token, in tokens from the start of the prompt."""
        return self.start + self.token_count


class Requirement(_Message, frozen=True, kw_only=True):
    """What a prefix needs to be usable with a given model: derived from the model's layers, needed by peers without one.

    A hit at token position p needs: FULL parts of all blocks before p (if ``full``); WINDOW parts of every block that
    overlaps [p - window_tokens, p), and of those that overlap [0, sink_tokens) (if ``window_tokens`` > 0); a STATE part
    that ends exactly at p (if ``state``).
    """

    block_tokens: Annotated[int, Meta(ge=limits.BLOCK_TOKENS_MIN, le=limits.BLOCK_TOKENS_MAX)]
    full: bool
    window_tokens: Count = 0
    sink_tokens: Count = 0
    state: bool = False


# --- handshake bodies (sealed under PSK-derived keys; see wire.frames for the clear header) --------------------------


class Hello(_Message, frozen=True, kw_only=True):
    """Opens a session. Signed by the node's identity key over every other field."""

    node_id: NodeName
    identity_public_key: Key32
    ephemeral_public_key: Key32
    incarnation: Number
    roles: Annotated[tuple[Word, ...], Meta(max_length=8)]
    software: Ascii
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Welcome(_Message, frozen=True, kw_only=True):
    """Answers a Hello. Signed over every other field, among them the hash of the Hello it answers."""

    node_id: NodeName
    identity_public_key: Key32
    ephemeral_public_key: Key32
    incarnation: Number
    roles: Annotated[tuple[Word, ...], Meta(max_length=8)]
    software: Ascii
    session_id: Id16
    hello_hash: Hash
    bus_port: Annotated[int, Meta(ge=0, le=65_535)]
    """Port of the node's bus on the host the client reached it by; 0 when it has none."""
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


# --- request bodies --------------------------------------------------------------------------------------------


Revocations = Annotated[
    tuple[Annotated[bytes, Meta(max_length=limits.REVOCATION_BYTES_MAX)], ...],
    Meta(max_length=limits.REVOCATIONS_PER_EXCHANGE_MAX),
]
RevocationMarks = Annotated[bytes, Meta(max_length=limits.REVOCATIONS_MAX * 8)]


class ExchangeCards(_Message, frozen=True, kw_only=True, tag=1):
    """Pull-merge of capability cards: the caller's go out, those that it lacks come back. Cards are signed blobs."""

    cards: Annotated[
        tuple[Annotated[bytes, Meta(max_length=limits.CARD_BYTES_MAX)], ...], Meta(max_length=limits.CARDS_PER_EXCHANGE_MAX)
    ]
    ages_ms: Annotated[tuple[Count, ...], Meta(max_length=limits.CARDS_PER_EXCHANGE_MAX)]
    """Age of each card in ms as known to the sender; TTL runs on the receiver's monotonic clock."""
    known: CardDigest | None = b""
    """What the caller holds (wire.cards.pack_digest): only newer cards come back; None: no cards are wanted back."""
    revocations: Revocations = ()
    """Signed revocations (wire.revocations) for the callee."""
    revoked: RevocationMarks = b""
    """Marks of the revocations that the caller holds; with ``known`` None nothing comes back for them."""


class Lookup(_Message, frozen=True, kw_only=True, tag=2):
    """Which parts of this prefix do you hold? What is found is leased until released or expired."""

    fingerprint: Hash
    requirement: Requirement
    block_hashes: PackedHashes
    lease_ms: Annotated[int, Meta(ge=0, le=600_000)] = limits.LEASE_MS_DEFAULT
    """0 asks without a lease."""


class Fetch(_Message, frozen=True, kw_only=True, tag=3):
    """Send me these parts. Progress: TransferGrant; then bulk chunks; Reply: TransferResult, after TransferDone."""

    lease_id: Id16
    parts: Annotated[tuple[PartRef, ...], Meta(min_length=1, max_length=limits.PARTS_PER_REQUEST_MAX)]
    suites: Annotated[tuple[CipherSuite, ...], Meta(min_length=1, max_length=4)]
    chunk_bytes_max: Annotated[int, Meta(ge=limits.CHUNK_BYTES_MIN, le=limits.CHUNK_BYTES_MAX)]
    credit_bytes: Count
    link_codec: LinkCodec = LinkCodec.NONE
    """What the sender should use."""
    value_bytes: ValueBytes = 1


class ReleaseLease(_Message, frozen=True, kw_only=True, tag=4):
    """The lease is no longer needed. Answered by Reply(Done), also when it is already gone."""

    lease_id: Id16


class Cut(_Message, frozen=True, kw_only=True, gc=False):
    """A tail of which nothing is stored: its tokens are the first ones of a longer block under the same parent.

    The K/V rows of a token do not depend on what follows, so the first ``token_count`` rows of that block's FULL and WINDOW
    parts are the tail's. The asker checks the tail's hash against its own tokens; of the block it knows only the hash.
    """

    parent_hash: Hash
    block_hash: Hash
    """The tail's."""
    token_count: Annotated[int, Meta(ge=1, le=limits.BLOCK_TOKENS_MAX)]
    within: Hash
    """The longer block's."""
    within_tokens: Annotated[int, Meta(ge=2, le=limits.BLOCK_TOKENS_MAX)]
    kinds: Annotated[int, Meta(ge=1, le=3)]
    """Bit k set: the longer block's part of PartKind k is held."""


class PublishOffer(_Message, frozen=True, kw_only=True, tag=5):
    """I hold these parts; take what you lack. Answered by Progress(PublishGrant) and Reply(PublishResult)."""

    fingerprint: Hash
    parts: Annotated[tuple[PartMeta, ...], Meta(min_length=1, max_length=limits.PARTS_PER_MANIFEST_MAX)]
    suites: Annotated[tuple[CipherSuite, ...], Meta(min_length=1, max_length=4)]
    chunk_bytes_max: Annotated[int, Meta(ge=limits.CHUNK_BYTES_MIN, le=limits.CHUNK_BYTES_MAX)]
    link_codec: LinkCodec = LinkCodec.NONE
    """What the publisher wants to use."""
    cuts: Annotated[tuple[Cut, ...], Meta(max_length=limits.PARTS_PER_MANIFEST_MAX)] = ()
    """Tails that are the beginnings of offered blocks: whoever holds them can drop them."""


class SubmitJob(_Message, frozen=True, kw_only=True, tag=6):
    """Compute the prefix of these tokens up to their last token but one, and send me the parts from ``have_tokens`` on.

    Progress: JobAccepted, then TransferGrant when the job starts to run, then JobProgress after each segment; parts flow
    while later segments are computed. Reply: JobResult. Cancel works at segment edges. Same ``job_id`` and content again
    (from the same node) attaches to the existing job; other content is INVALID_ARGUMENT. Of a prompt that it cannot open a
    worker says UNAUTHENTICATED.
    """

    job_id: Id16
    fingerprint: Hash
    prompt: SealedPrompt
    have_tokens: Count
    suites: Annotated[tuple[CipherSuite, ...], Meta(min_length=1, max_length=4)]
    chunk_bytes_max: Annotated[int, Meta(ge=limits.CHUNK_BYTES_MIN, le=limits.CHUNK_BYTES_MAX)]
    credit_bytes: Count
    link_codec: LinkCodec = LinkCodec.NONE
    """What the worker should use."""
    value_bytes: ValueBytes = 1
    checkpoint_tokens: Count = 0
    """Also send, while computing, what makes a hit possible at each multiple of so many tokens: the window and state parts
    there. If the job breaks off, the asker goes on from the last of them. 0: none; a multiple of the block size."""


class PrefillPolicy(IntEnum):
    LOCAL_FALLBACK = 0
    """Use the fleet when it pays; whatever fails is computed locally."""
    REMOTE_REQUIRED = 1
    """Never compute prefill here; UNAVAILABLE with the reason instead."""
    LOCAL_ONLY = 2
    """Never ask the fleet."""


class CreateSession(_Message, frozen=True, kw_only=True, tag=7):
    """Open an inference session on a primary. Reply: SessionCreated."""

    label: OptionalName = ""
    eos_token_ids: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    """Empty: the model's own."""
    policy: PrefillPolicy | None = None
    """None: the primary's default."""
    use_local_cache: bool = True
    """False: neither look into nor fill the primary's own store for this session."""
    publish: bool = True
    """False: keep this session's blocks off other nodes."""
    exclude_nodes: Annotated[tuple[NodeName, ...], Meta(max_length=64)] = ()
    """Nodes not to ask for this session (diagnosis, comparison)."""


class AppendTokens(_Message, frozen=True, kw_only=True, tag=8):
    """Append to the session's history and bring its KV up to date. Progress: PrefillProgress. Reply: Appended."""

    session_id: Name
    tokens: PackedTokens


class Generate(_Message, frozen=True, kw_only=True, tag=9):
    """Decode. Progress: Tokens. Reply: Generated. temperature 0 is greedy; top_p 0 and top_k 0 mean off."""

    session_id: Name
    max_tokens: Annotated[int, Meta(ge=1, le=limits.PROMPT_TOKENS_MAX)]
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    top_k: Count = 0
    seed: Number | None = None


class CloseSession(_Message, frozen=True, kw_only=True, tag=10):
    """Forget the session. Reply: SessionClosed; NOT_FOUND the second time."""

    session_id: Name


class GetSession(_Message, frozen=True, kw_only=True, tag=11):
    """Reply: SessionState."""

    session_id: Name


class GetStatus(_Message, frozen=True, kw_only=True, tag=12):
    """What is this node doing? Reply: Status."""


class GetRequests(_Message, frozen=True, kw_only=True, tag=13):
    """Where did the KV of the last ``count`` requests come from, and what did they cost? Reply: Requests."""

    count: Annotated[int, Meta(ge=1, le=limits.REQUEST_RECORDS_MAX)]


RequestBody: TypeAlias = (
    ExchangeCards
    | Lookup
    | Fetch
    | ReleaseLease
    | PublishOffer
    | SubmitJob
    | CreateSession
    | AppendTokens
    | Generate
    | CloseSession
    | GetSession
    | GetStatus
    | GetRequests
)


# --- reply bodies ------------------------------------------------------------------------------------------------


class Done(_Message, frozen=True, kw_only=True, tag=100):
    """It is done; there is nothing more to say."""


class CardList(_Message, frozen=True, kw_only=True, tag=101):
    cards: Annotated[
        tuple[Annotated[bytes, Meta(max_length=limits.CARD_BYTES_MAX)], ...], Meta(max_length=limits.CARDS_PER_EXCHANGE_MAX)
    ]
    ages_ms: Annotated[tuple[Count, ...], Meta(max_length=limits.CARDS_PER_EXCHANGE_MAX)]
    wanted: Annotated[bytes, Meta(max_length=limits.CARDS_PER_EXCHANGE_MAX * 8)] = b""
    """Marks (wire.cards.mark_of) of cards that the caller's digest has and the callee lacks."""
    more: bool = False
    """There are more new cards than one message takes: ask again."""
    revocations: Revocations = ()
    """Those that the caller lacks."""
    wanted_revocations: RevocationMarks = b""
    """Marks of those that the callee lacks."""


class Tail(_Message, frozen=True, kw_only=True, gc=False):
    """A tail stored under a block: its tokens follow that block. The asker checks the hash against its own tokens."""

    parent_hash: Hash
    block_hash: Hash
    token_count: Annotated[int, Meta(ge=1, le=limits.BLOCK_TOKENS_MAX)]
    kinds: Annotated[int, Meta(ge=1, le=7)]
    """Bit k set: the part of PartKind k is held."""


class LookupReply(_Message, frozen=True, kw_only=True, tag=102):
    """What of the asked prefix is held: a bitmap over the asked hashes for each PartKind, and tails.

    ``lease_id`` is 16 zero bytes when nothing was found or no lease was asked for. ``part_bytes[kind]`` is the mean size
    of the held parts of that kind, for planning.
    """

    present: Annotated[tuple[Bitmap, Bitmap, Bitmap], Meta()]
    tails: Annotated[tuple[Tail, ...], Meta(max_length=64)]
    """Tails under the asked blocks and under the root (parent hash of 32 zero bytes), longest prefix first."""
    part_bytes: tuple[Count, Count, Count]
    lease_id: Id16
    lease_ms: Count
    epoch: Count
    cuts: Annotated[tuple[Cut, ...], Meta(max_length=64)] = ()
    """Tails under the same parents that are beginnings of longer blocks which were not asked for."""


class TransferResult(_Message, frozen=True, kw_only=True, tag=103):
    sent_parts: Count
    sent_bytes: Count


class PublishResult(_Message, frozen=True, kw_only=True, tag=104):
    stored_parts: Count
    already_held_parts: Count
    refused_parts: Count
    reason: Text


class JobResult(_Message, frozen=True, kw_only=True, tag=105):
    tokens_computed: Count
    tokens_reused: Count
    """Tokens the worker took from its own cache."""
    compute_ms: Count
    sent_bytes: Count


class SessionCreated(_Message, frozen=True, kw_only=True, tag=106):
    session_id: Name
    model_id: OptionalName
    max_context_tokens: Count
    eos_token_ids: tuple[Count, ...]


class SourceKind(IntEnum):
    """Where the KV of a prefix came from."""

    COMPUTED = 0
    HOT = 1
    """The primary's own store."""
    REMOTE_CACHE = 2
    """Another node's store."""
    WORKER = 3
    """A prefill job."""
    LIVE = 4
    """The session's own KV of earlier turns."""


class Source(_Message, frozen=True, kw_only=True):
    """One stretch [start, end) of the prompt and where its KV came from.

    An empty one at the end: a node that sent ``transfer_bytes`` and that no stretch is named after.
    """

    kind: SourceKind
    start: Count
    end: Count
    node_id: OptionalName
    transfer_bytes: Count
    elapsed_ms: float


class Decision(_Message, frozen=True, kw_only=True):
    """One choice of the planner, with the estimates behind it in milliseconds, by option ("compute", "import", ...)."""

    what: Name
    chosen: OptionalName
    costs_ms: Annotated[dict[Text, float], Meta(max_length=64)]
    text: Text


class Explanation(_Message, frozen=True, kw_only=True):
    """Why a prompt cost what it cost. ``reasons``: why it was not better, e.g. "peer b timed out".

    ``diverged_at``: the first token position at which the prompt differs from everything cached that begins like it, to
    the block; None unless something cached is known to go on there with other tokens.
    """

    prompt_tokens: Count
    sources: tuple[Source, ...]
    reasons: tuple[Text, ...]
    elapsed_ms: float
    decisions: Annotated[tuple[Decision, ...], Meta(max_length=32)] = ()
    diverged_at: Count | None = None


class Appended(_Message, frozen=True, kw_only=True, tag=107):
    history_tokens: Count
    explanation: Explanation


class StopReason(IntEnum):
    MAX_TOKENS = 1
    EOS = 2
    CANCELLED = 3
    CONTEXT_FULL = 4


class Generated(_Message, frozen=True, kw_only=True, tag=108):
    stop_reason: StopReason
    token_count: Count
    history_tokens: Count
    elapsed_ms: float


class SessionClosed(_Message, frozen=True, kw_only=True, tag=109):
    history_tokens: Count


class SessionState(_Message, frozen=True, kw_only=True, tag=110):
    history_tokens: Count
    kv_bytes: Count
    idle_ms: Count
    busy: bool


class Status(_Message, frozen=True, kw_only=True, tag=111):
    """A node's state as sections of named figures; names are documented in docs/telemetry.md."""

    node_id: NodeName
    roles: tuple[Word, ...]
    sections: dict[str, dict[str, int | float | str | bool | None]]
    peers: tuple[dict[str, int | float | str | bool | None], ...]
    recent: tuple[Text, ...]
    """The last noteworthy events, oldest first, one line each."""


class Requests(_Message, frozen=True, kw_only=True, tag=112):
    """The last finished requests of a primary, oldest first: each a wire.events.RequestEvent as it travels on the bus."""

    records: Annotated[
        tuple[Annotated[bytes, Meta(max_length=limits.BUS_MESSAGE_BYTES_MAX)], ...],
        Meta(max_length=limits.REQUEST_RECORDS_MAX),
    ]


ReplyBody: TypeAlias = (
    Done
    | CardList
    | LookupReply
    | TransferResult
    | PublishResult
    | JobResult
    | SessionCreated
    | Appended
    | Generated
    | SessionClosed
    | SessionState
    | Status
    | Requests
)


# --- progress bodies (server to client while a request is open) -----------------------------------------------------


class TransferGrant(_Message, frozen=True, kw_only=True, tag=200):
    """Where to pull the parts: connect one PULL to ``port`` on the host the server was reached by."""

    transfer_id: Id16
    port: Port
    token: Annotated[str, Meta(min_length=32, max_length=64)]
    """One-time ZMTP PLAIN password, hexadecimal."""
    key: Key32
    suite: CipherSuite
    chunk_bytes: Annotated[int, Meta(ge=limits.CHUNK_BYTES_MIN, le=limits.CHUNK_BYTES_MAX)]
    link_codec: LinkCodec = LinkCodec.NONE
    """What the transfer uses; NONE whatever was wanted when the server does not want to."""


class PublishGrant(_Message, frozen=True, kw_only=True, tag=201):
    """Where to push the wanted parts (bitmap over the offer); ``grant`` is None when none are wanted."""

    wanted: Bitmap
    grant: TransferGrant | None
    credit_bytes: Count


class Credit(_Message, frozen=True, kw_only=True, tag=202):
    """The receiver of a bulk transfer has processed this many more bytes. Travels as Progress or as Update."""

    credit_bytes: Annotated[int, Meta(ge=1, le=limits.TRANSFER_BYTES_MAX)]


class JobAccepted(_Message, frozen=True, kw_only=True, tag=203):
    """The first word of a worker on a job. Without the right ``proof`` (:mod:`wire.job_seal`) nothing of it is used."""

    proof: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
    queued_jobs: Count
    queued_tokens: Count
    eta_ms: Count


class JobProgress(_Message, frozen=True, kw_only=True, tag=204):
    tokens_done: Count
    tokens_total: Count
    tokens_reused: Count


class PrefillProgress(_Message, frozen=True, kw_only=True, tag=205):
    tokens_done: Count
    tokens_total: Count
    source: SourceKind


class Tokens(_Message, frozen=True, kw_only=True, tag=206):
    tokens: PackedTokens


ProgressBody: TypeAlias = TransferGrant | PublishGrant | Credit | JobAccepted | JobProgress | PrefillProgress | Tokens


class TransferDone(_Message, frozen=True, kw_only=True, tag=300):
    """The asker has every part it wanted (or gives up: ``complete`` false); the sender may close."""

    complete: bool


UpdateBody: TypeAlias = Credit | TransferDone


# --- envelope ------------------------------------------------------------------------------------------------------


class Request(_Message, frozen=True, kw_only=True, tag=1):
    request_id: Number
    deadline_ms: Annotated[int, Meta(ge=1, le=86_400_000)]
    """Time the server has from receipt, in ms."""
    body: RequestBody


class Update(_Message, frozen=True, kw_only=True, tag=2):
    request_id: Number
    body: UpdateBody


class Cancel(_Message, frozen=True, kw_only=True, tag=3):
    request_id: Number


class Reply(_Message, frozen=True, kw_only=True, tag=4):
    request_id: Number
    body: ReplyBody


class Progress(_Message, frozen=True, kw_only=True, tag=5):
    request_id: Number
    body: ProgressBody


class Failure(_Message, frozen=True, kw_only=True, tag=6):
    request_id: Number
    code: FailureCode
    message: Text


class Ping(_Message, frozen=True, kw_only=True, tag=7):
    """Liveness, client to server; any traffic counts as life."""


class Pong(_Message, frozen=True, kw_only=True, tag=8):
    """Answers Ping."""


class Goodbye(_Message, frozen=True, kw_only=True, tag=9):
    """The sender is leaving on purpose: open requests will not be answered."""

    reason: Text
    moved_to: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """From a server: it goes on at this port of the same host. Nothing is open any more, and requests from ``unopened_from``
    on were not looked at, so they may be sent again there. 0: it does not go on."""
    unopened_from: Number = 0


ClientEnvelope: TypeAlias = Request | Update | Cancel | Ping | Goodbye
ServerEnvelope: TypeAlias = Reply | Progress | Failure | Pong | Goodbye
Envelope: TypeAlias = ClientEnvelope | ServerEnvelope
