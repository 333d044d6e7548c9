// A component that is drawn again only when one of its values is another one.
import { Component, type ComponentChild, createElement, type FunctionComponent } from "preact";

export function memo<P extends object>(inner: (props: P) => ComponentChild): FunctionComponent<P> {
  return class extends Component<P> {
    override shouldComponentUpdate(next: P): boolean {
      return Object.keys({ ...next, ...this.props }).some((key) => next[key as keyof P] !== this.props[key as keyof P]);
    }
    override render() {
      return createElement(inner as FunctionComponent<P>, this.props);
    }
  } as unknown as FunctionComponent<P>;
}
