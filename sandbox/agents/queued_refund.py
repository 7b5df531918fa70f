"""The refund agent as a worker starts it: the order is the run's input.

twiceshy start refund --input '{"order": "A-1001"}'
"""

import json
import sys
from urllib.error import HTTPError
from urllib.request import urlopen

from sandbox.agents.refund import main

if __name__ == "__main__":
    with urlopen("http://twiceshy.internal/run") as answer:
        order = json.load(answer)["input"]["order"]
    try:
        main(order)
    except HTTPError as error:
        sys.exit(f"{error.url}: {error.code} {error.reason}")
