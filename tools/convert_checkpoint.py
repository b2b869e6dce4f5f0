#!/usr/bin/env python3
"""Checkpoint tools as a script: `tools/convert_checkpoint.py ACTION ...` is `megatron-kd convert ACTION ...`."""

import sys

from megatron_kd.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
