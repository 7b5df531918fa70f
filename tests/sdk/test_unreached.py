"""What cannot be reached from outside goes straight out: here it fails, for only the sidecar knows the sandbox's CA."""

from pathlib import Path

import pytest

from tests.sdk.place import Place
from tests.sdk.results import installed
from tests.sdk.sdks import Sdk

POOL = Sdk("urllib3 PoolManager", "urllib3", "urllib3_poolmanager.py")


@pytest.mark.check_all
def test_a_pool_manager_reads_no_proxy_variable(place: Place, tmp_path: Path) -> None:
    installed(POOL)
    with place.stage(POOL, tmp_path / "run") as stage:
        code, _, err = stage.end(stage.start())
        assert (code, stage.sandbox.requests()) == (1, [])
        assert "CERTIFICATE_VERIFY_FAILED" in err
        assert not stage.world.fetch("SELECT key FROM twiceshy.step WHERE run_id = $1", stage.run_id)
