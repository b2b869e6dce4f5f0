"""`python -m megatron_kd`, so that `torchrun -m megatron_kd train ...` works."""

import sys

from megatron_kd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
