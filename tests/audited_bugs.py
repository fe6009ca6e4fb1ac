"""Networks with bugs in their initialisation, from public threads, and the audits of each before and after its fix.

    python audited_bugs.py --seeds 10

prints a table in Markdown: how often the audit found the bug, named it, and raised a false alarm after the fix; with
`--json FILE` it writes the verdicts, and `--bugs` chooses rows. The interpreter needs torch, transformers, flax and
this package; nothing is downloaded.
"""

import argparse
import json
from pathlib import Path

import audited_jax  # noqa: F401  registers its bugs
import audited_torch  # noqa: F401
import records
from audited import BUGS

import sdeinfer as si

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed; rules were written at 0 and 1")
    parser.add_argument("--bugs", nargs="+", default=list(BUGS), choices=list(BUGS))
    parser.add_argument("--json", type=Path, help="write all verdicts to this file")
    parser.add_argument("--record", action="store_true", help="write the table to docs/records")
    given = parser.parse_args()
    si.use_compilation_cache()
    verdicts, rows, seeds = {}, {}, range(given.first, given.first + given.seeds)
    for name in given.bugs:
        before, after = (BUGS[name].verdicts(seeds, fixed=fixed) for fixed in (False, True))
        verdicts[name] = {"cause": BUGS[name].cause, "before": before, "after": after}
        rows[BUGS[name].says] = BUGS[name].row(before, after)
        print(BUGS[name].says, *rows[BUGS[name].says], sep=" | ", flush=True)
    if given.record:
        records.update("audited_bugs", rows)
    if given.json is not None:
        given.json.write_text(json.dumps(verdicts, indent=1, ensure_ascii=False))
