import boto3
from telling import tell

table = boto3.resource("dynamodb").create_table(
    TableName="pantry",
    KeySchema=[{"AttributeName": "item", "KeyType": "HASH"}],
    AttributeDefinitions=[{"AttributeName": "item", "AttributeType": "S"}],
    BillingMode="PAY_PER_REQUEST",
)
tell(table.name)
table.update_item(Key={"item": "rice"}, UpdateExpression="ADD grams :n", ExpressionAttributeValues={":n": 800})
tell("added")
tell(int(table.get_item(Key={"item": "rice"})["Item"]["grams"]))
