"""The profile's JSON Schema, as docs/profile.schema.json holds it. To write it anew after a change:

python -m runtime.profile.schema > docs/profile.schema.json
"""

from __future__ import annotations

import json

from runtime.profile.document import SCHEMA_VERSION, Profile


def schema_text() -> str:
    schema = Profile.model_json_schema(mode="serialization")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = f"Hardware profile of outrider, version {SCHEMA_VERSION}"
    return json.dumps(schema, indent=1) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
