"""`python -m sgt_ds`: the same as `sgt-ds`."""

from sgt_ds.cli import main

raise SystemExit(main())
