package bascule.xa;

import jakarta.jms.JMSException;
import jakarta.jms.Message;
import jakarta.jms.TextMessage;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;

/** The broker's answer to a request about branches. */
final class Reply {
    static final String COMMITTED = "committed";
    static final String ROLLED_BACK = "rolled-back";
    /** The branch may have ended either way: the broker remembers only the most recent outcomes. */
    static final String FORGOTTEN = "forgotten";

    private static final String CODE = "xaCode";
    private static final String POSITION = "position";

    /** XA_OK, XA_RDONLY, or the error code of an XAException. */
    final int code;
    final String description;
    /** The outcome of a branch that has ended; null if the broker does not report it. */
    final String outcome;
    /** The end of the broker's journal at the time of the answer. */
    final long position;
    final String text;

    Reply(Message answer) throws JMSException {
        if (!answer.propertyExists(CODE)) {
            throw new JMSException("the answer has no property " + CODE + "; the peer is not a Bascule broker");
        }
        code = answer.getIntProperty(CODE);
        description = answer.getStringProperty("statusDescription");
        outcome = answer.getStringProperty("outcome");
        position = answer.propertyExists(POSITION) ? answer.getLongProperty(POSITION) : 0;
        text = answer instanceof TextMessage ? ((TextMessage) answer).getText() : "";
    }

    boolean succeeded() {
        return code == XAResource.XA_OK || code == XAResource.XA_RDONLY;
    }

    boolean rolledBack() {
        return code >= XAException.XA_RBBASE && code <= XAException.XA_RBEND;
    }

    /** Returns whether the branch has ended, and the broker remembers this outcome as certain or possible. */
    boolean hasEnded(String how) {
        return code == XAException.XAER_NOTA && how.equals(outcome);
    }
}
