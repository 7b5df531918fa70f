from github import Auth, Github
from telling import URL, tell

client = Github(base_url=f"{URL}/github", auth=Auth.Token("ghp_1"))

repository = client.get_repo("ada/engine")
tell(repository.full_name)
issue = repository.create_issue(title="rice is out")
tell(issue.number)
tell(issue.create_comment("rice is ordered").body)
