import urllib3
from telling import URL, tell

tell(urllib3.PoolManager().request("GET", f"{URL}/pantry", retries=False).json())
