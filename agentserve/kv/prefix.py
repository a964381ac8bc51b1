"""The prefix index: which full blocks already have KV, found by content.

A block's key is SHA-256 over (parent digest, namespace, model identity, token ids as fixed-width
bytes), so equal keys mean equal prefixes unless SHA-256 is broken. The index does not rely on that:
a hit needs the parent entry to be the very one just matched, and equal token bytes.

Invariants, verified by `PrefixIndex.check`: an entry has a copy in some tier, is filed under its
own digest, and was not condemned.
"""

import hashlib
import struct
from collections.abc import Callable

from agentserve.kv.blocks import Block, LogicalBlock, require


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 digest of `data`."""
    return hashlib.sha256(data).digest()


class PrefixIndex:
    """Entries of one KV group of one model."""

    def __init__(self, identity: str, digest: Callable[[bytes], bytes] = sha256) -> None:
        self._identity = identity
        self._identity_bytes = identity.encode()
        self._digest = digest
        self._entries: dict[bytes, LogicalBlock] = {}
        self.condemned = 0  # blocks that failed steps wrote, since the start

    def __len__(self) -> int:
        return len(self._entries)

    def seal(self, parent: LogicalBlock | None, tokens: bytes, namespace: str) -> LogicalBlock:
        """Return the record of a full run of `tokens` (packed int32) after `parent`."""
        digest = self._key(parent, tokens, namespace)
        return LogicalBlock(parent, tokens, namespace, self._identity, digest)

    def find(
        self, parent: LogicalBlock | None, tokens: bytes, namespace: str
    ) -> LogicalBlock | None:
        """Return the entry for `tokens` after the entry `parent`, or None."""
        if parent is not None and not parent.indexed:
            return None
        return self._hit(self._key(parent, tokens, namespace), parent, tokens, namespace)

    def twin(self, parent: LogicalBlock | None, block: LogicalBlock) -> LogicalBlock | None:
        """Return the entry after `parent` with the content of `block`, without hashing again."""
        return self._hit(block.digest, parent, block.tokens, block.namespace)

    def intern(self, block: LogicalBlock) -> LogicalBlock | None:
        """Return the entry equal to `block`, which becomes it if there is none.

        None when `block` cannot be indexed: its parent is not, its key is taken by other content,
        or it was condemned.
        """
        if block.indexed:
            return block
        if block.condemned or (block.parent is not None and not block.parent.indexed):
            return None
        if block.digest in self._entries:
            return self.twin(block.parent, block)
        self._entries[block.digest] = block
        block.indexed = True
        return block

    def reaches(self, block: LogicalBlock) -> bool:
        """Whether `block` is an entry, and with it all that it hangs from."""
        return block.indexed and not self.condemned

    def remove(self, block: LogicalBlock) -> None:
        """Forget the entry, if `block` is one."""
        if block.indexed:
            block.indexed = False
            del self._entries[block.digest]

    def condemn(self, block: LogicalBlock) -> None:
        """Never match `block` again: the step that wrote it failed."""
        block.condemned = True
        self.condemned += 1
        self.remove(block)

    def cleared(self, holder: Block) -> None:
        """Forget `holder` if its last copy is gone."""
        if isinstance(holder, LogicalBlock) and not holder.copies:
            self.remove(holder)

    def check(self) -> None:
        """Verify the invariants of this module. Raises InvariantError."""
        for digest, entry in self._entries.items():
            require(entry.indexed and entry.digest == digest, "INV-02: an entry is misfiled")
            require(bool(entry.copies), "INV-02: an index entry has no copy in any tier")
            require(not entry.condemned, "INV-04: a condemned block is indexed")

    def _key(self, parent: LogicalBlock | None, tokens: bytes, namespace: str) -> bytes:
        name = namespace.encode()
        lengths = struct.pack("<II", len(name), len(self._identity_bytes))
        before = parent.digest if parent is not None else b""
        return self._digest(b"".join((lengths, name, self._identity_bytes, tokens, before)))

    def _hit(
        self, digest: bytes, parent: LogicalBlock | None, tokens: bytes, namespace: str
    ) -> LogicalBlock | None:
        entry = self._entries.get(digest)
        if (
            entry is not None
            and entry.parent is parent
            and entry.tokens == tokens
            and entry.namespace == namespace
        ):
            return entry
        return None
