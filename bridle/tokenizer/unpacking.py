"""`python -m bridle.tokenizer.unpacking FILE.gguf` unpacks a GGUF file into the cache, with the vocabulary that its
tokenizer needs. See `bridle.early_start`.
"""

import sys
from pathlib import Path

from bridle.gguf.folder import unpack
from bridle.tokenizer import Tokenizer

if __name__ == "__main__":
    Tokenizer.load(unpack(Path(sys.argv[1])))
