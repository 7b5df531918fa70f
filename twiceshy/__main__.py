"""``python -m twiceshy package.module:function``: do this process's run with that agent."""

import sys

from twiceshy.entry import run

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m twiceshy package.module:function")
    run(sys.argv[1])
