"""The small models' chat template in the demo: it invites to think, and drops what was thought in earlier turns.

So do Qwen3's and others. A prompt does not go on where the one before it ended, but a few tokens earlier.
"""

from typing import Final

from marconi.demo.tiny_model.tokenizer import TURN_END, TURN_START

REASONING: Final = (
    "{% set last = namespace(user=-1) %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}"
    f"{TURN_START}{{{{ message['role'] }}}}{{{{ '\\n' }}}}"
    "{% if message['reasoning_content'] and loop.index0 > last.user %}"
    "<think>{{ '\\n' }}{{ message['reasoning_content'] }}"
    "{% endif %}"
    f"{{{{ message['content'] or '' }}}}{TURN_END}{{{{ '\\n' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{TURN_START}assistant{{{{ '\\n' }}}}<think>{{{{ '\\n' }}}}{{% endif %}}"
)
