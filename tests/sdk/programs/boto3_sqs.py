import boto3
from telling import tell

sqs = boto3.client("sqs")

queue = sqs.create_queue(QueueName="pantry")["QueueUrl"]
tell(queue.rpartition("/")[2])
tell(sqs.send_message(QueueUrl=queue, MessageBody="rice is out")["MD5OfMessageBody"])
asked = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["ApproximateNumberOfMessages"])
tell(asked["Attributes"])
