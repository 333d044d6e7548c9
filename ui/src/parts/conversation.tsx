// Messages of a conversation. Everything a model wrote is text here, never markup.
import type { Maybe, MediaItem, Message } from "../api";
import { signed } from "../format";
import { Pictures } from "./picture";

function pretty(json: string): string {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // a model may write anything
  }
}

/** Text, and images and videos between it. */
function Parts({ run, media, parts }: { run: string; media: MediaItem[]; parts: NonNullable<Message["parts"]> }) {
  return (
    <div class="content parts">
      {parts.map((part, at) => {
        if (part.type === "text") return part.text ? <pre key={at}>{part.text}</pre> : null;
        const item = media.find((each) => each.digest === part.digest) ?? null;
        return <Pictures key={at} run={run} item={item} digest={part.digest} name={part.type} />;
      })}
    </div>
  );
}

export function Conversation({ run, media, messages, turnRewards = [] }: { run: string; media: MediaItem[]; messages: Message[]; turnRewards?: Maybe[] }) {
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
            {message.parts ? <Parts run={run} media={media} parts={message.parts} /> : message.content ? <pre class="content">{message.content}</pre> : null}
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
