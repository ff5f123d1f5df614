"""JSON that matches a schema, written by any model.

    bridle run examples/json_by_schema.py

Names of fields, quotation marks and commas are forced: they are appended without sampling.
"""

import json

import pyaici.server as aici

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,15}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


async def main() -> None:
    await aici.FixedTokens("Q: Turn this into JSON: Emma, 34 years old, from Lisbon.\nA: ")
    text = await aici.gen_text(json_schema=SCHEMA, max_tokens=80, store_var="record")
    record = json.loads(text)
    print(f"{record['name']} will be {record['age'] + 1} next year")


aici.start(main())
