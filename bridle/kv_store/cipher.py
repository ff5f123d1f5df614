"""Encryption of blocks with an operator's key: AES-256-GCM, with a random nonce for each block.

A block is encrypted together with its name, so no block can replace another one. The names of stored blocks depend on
the key too. Without the key, the files reveal neither the contents of a block nor the prompts that were computed.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from bridle.distribution import install_hint
from bridle.errors import InvalidRequest
from bridle.kv_store.records import Buffer

KEY_FILE_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16


class BlockCipher:
    """Encrypts and decrypts blocks. `secret` is the operator's key."""

    #: Number of bytes by which an encrypted block is longer.
    overhead = _NONCE_BYTES + _TAG_BYTES

    def __init__(self, secret: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._secret = secret
        self._cipher = AESGCM(blake2b(secret, digest_size=32, person=b"bridle-kv-cipher").digest())

    def derive(self, text: str) -> str:
        """Return a text that is derived from `text` and the key and reveals neither of them."""
        return blake2b(text.encode(), digest_size=16, key=self._secret, person=b"bridle-kv-names").hexdigest()

    def seal(self, name: bytes, block: Buffer) -> bytes:
        """Return an encrypted block."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, block, name)

    def open(self, name: bytes, sealed: memoryview, into: memoryview) -> bool:
        """Decrypt a block into `target`, which has the size of the block. Returns False if the block was not encrypted
        under this name."""
        from cryptography.exceptions import InvalidTag

        try:
            into[:] = self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], name)
        except InvalidTag:
            return False
        return True


def read_cipher(path: Path) -> BlockCipher:
    """Return the cipher for the key in a file, which has 64 hexadecimal digits. Raises `InvalidRequest`."""
    try:
        secret = bytes.fromhex(path.expanduser().read_text("ascii"))
    except OSError as error:
        raise InvalidRequest(
            f"kv_store_key: got {str(path)!r}, which cannot be read: {error.strerror}. Name a file with a key that "
            "`openssl rand -hex 32` has written",
            "kv_store_key",
        ) from None
    except ValueError:
        secret = b""
    if len(secret) != KEY_FILE_BYTES:
        raise InvalidRequest(
            f"kv_store_key: got {str(path)!r}; a key is {2 * KEY_FILE_BYTES} hexadecimal digits. `openssl rand -hex "
            f"{KEY_FILE_BYTES}` writes one",
            "kv_store_key",
        )
    try:
        return BlockCipher(secret)
    except ImportError:
        raise InvalidRequest(
            f"kv_store_key: encryption needs the package cryptography: {install_hint('encryption')}", "kv_store_key"
        ) from None
