import boto3
from telling import tell

s3 = boto3.client("s3")

tell(s3.create_bucket(Bucket="pantry")["ResponseMetadata"]["HTTPStatusCode"])
s3.put_bucket_versioning(Bucket="pantry", VersioningConfiguration={"Status": "Enabled"})
tell(s3.put_object(Bucket="pantry", Key="rice", Body=b"800 grams")["ETag"])
versions = s3.list_object_versions(Bucket="pantry")["Versions"]
tell([len(versions), s3.get_object(Bucket="pantry", Key="rice")["Body"].read().decode()])
