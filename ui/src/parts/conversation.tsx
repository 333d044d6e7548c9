// Messages of a conversation. Everything a model wrote is text here, never markup.
import type { Maybe, Message } from "../api";
import { signed } from "../format";

function pretty(json: string): string {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // a model may write anything
  }
}

export function Conversation({ messages, turnRewards = [] }: { messages: Message[]; turnRewards?: Maybe[] }) {
  if (messages.length === 0) return <p class="muted">The file has no messages of this rollout. The tokens are the whole record.</p>;
  let turn = -1;
  const numReplies = messages.filter((message) => message.role === "assistant").length;
  const first = numReplies - turnRewards.length;
  return (
    <ol class="conversation">
      {messages.map((message, at) => {
        if (message.role === "assistant") turn += 1;
        const reward = message.role === "assistant" ? turnRewards[turn - first] : undefined;
        return (
          <li key={at} class={`utterance role-${message.role}`}>
            <header>
              <span class="role">{message.role}</span>
              {message.name ? <code>{message.name}</code> : null}
              {message.role === "assistant" && numReplies > 1 ? <span class="muted">turn {turn + 1}</span> : null}
              {reward !== undefined && reward !== null ? <span class="num reward">reward {signed(reward)}</span> : null}
            </header>
            {message.content ? <pre class="content">{message.content}</pre> : null}
            {(message.tool_calls ?? []).map((call, index) => (
              <div class="call" key={index}>
                <span class="call-name">
                  calls <code>{call.name}</code>
                </span>
                <pre>{pretty(call.arguments)}</pre>
              </div>
            ))}
          </li>
        );
      })}
    </ol>
  );
}
